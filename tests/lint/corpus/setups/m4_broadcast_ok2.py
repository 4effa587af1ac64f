import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.05)
held_out = torch.randn(50, 4)
best = float("inf")
for epoch in range(20):
    opt.zero_grad()
    net(torch.randn(4, 4)).pow(2).mean().backward()
    opt.step()
    stop = torch.zeros(1)
    if dist.get_rank() == 0:
        with torch.no_grad():
            score = net.module(held_out).pow(2).mean().item()
        stop[0] = float(score > best * 1.5)
        best = min(best, score)
    dist.broadcast(stop, src=0)
    if stop.item():
        break
dist.destroy_process_group()
