import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    opt.zero_grad()
    model(torch.randn(8, 100)).mean().backward()
    opt.step()
    torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, "checkpoint.pt")
dist.destroy_process_group()
