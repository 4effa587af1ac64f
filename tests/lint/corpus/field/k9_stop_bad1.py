import signal
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

STOP = False


def on_term(signum, frame):
    global STOP
    STOP = True


dist.init_process_group("gloo")
signal.signal(signal.SIGUSR1, on_term)
model = DDP(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1000):
    opt.zero_grad()
    model(torch.randn(2, 2)).sum().backward()
    opt.step()
    if STOP:
        break
dist.destroy_process_group()
