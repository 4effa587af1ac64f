import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    loss = net(torch.randn(4, 3)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"[rank {rank}] step {step} local loss {loss.item():.3f}")
dist.destroy_process_group()
