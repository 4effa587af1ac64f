import torch
import torch.distributed as dist

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(10 + dist.get_rank())
for _ in range(3):
    opt.zero_grad()
    (net(torch.randn(8, 4)).pow(2).mean() / world).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    opt.step()
dist.destroy_process_group()
