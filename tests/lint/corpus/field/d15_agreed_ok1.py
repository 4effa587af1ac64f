import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
t0 = time.time()
for i in range(1000):
    opt.zero_grad()
    loss = model(torch.randn(2, 2)).sum()
    bad = torch.tensor(float(not torch.isfinite(loss)))
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if bad.item() > 0:
        continue
    loss.backward()
    opt.step()
    over = torch.tensor([1 if time.time() - t0 > 600 else 0])
    dist.broadcast(over, src=0)
    if over.item():
        break
dist.destroy_process_group()
