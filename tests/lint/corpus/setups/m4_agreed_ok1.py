import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.05)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1)
best, bad = float("inf"), 0
for epoch in range(20):
    loss = net(torch.randn(4, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    val = loss.detach().clone()
    dist.all_reduce(val)
    val = val.item() / dist.get_world_size()
    plateau.step(val)
    best, bad = (val, 0) if val < best else (best, bad + 1)
    if bad > 3:
        break
dist.destroy_process_group()
