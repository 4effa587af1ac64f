import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
torch.manual_seed(1000 + dist.get_rank())
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(4, 8)
    opt.zero_grad()
    net(x).pow(2).mean().backward()
    opt.step()
dist.destroy_process_group()
