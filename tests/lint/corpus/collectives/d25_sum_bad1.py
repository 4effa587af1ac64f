import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
    opt.step()
print(dist.get_rank(), model.weight.sum().item())
dist.destroy_process_group()
