import torch
import torch.distributed as dist

from latest import find_latest

dist.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
path = find_latest("ckpts")
if path:
    net.load_state_dict(torch.load(path, map_location="cpu"))
ddp = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), 0.1)
first = int(path.split("_")[-1][:-3]) + 1 if path else 0
for step in range(first, 100):
    opt.zero_grad()
    ddp(torch.ones(1, 2)).sum().backward()
    opt.step()
    if dist.get_rank() == 0 and step % 10 == 0:
        torch.save(net.state_dict(), f"ckpts/step_{step}.pt")
dist.destroy_process_group()
