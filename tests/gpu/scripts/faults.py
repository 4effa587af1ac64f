"""Plain scripts of torch that go wrong on a GPU, one for each word."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

DEVICE = os.environ.get("RANKWISE_TEST_DEVICE", "cuda")
fault = sys.argv[1]
if DEVICE == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if "nccl" in sys.argv else 0)

if fault == "memory":
    activations = torch.empty(1 << 45, dtype=torch.uint8, device=DEVICE)  # more than any GPU has

if fault == "assert":
    table = torch.zeros(4, device=DEVICE)
    rows = table[torch.tensor([7], device=DEVICE)]
    print(rows.sum().item())  # where it is noticed

dist.init_process_group("nccl" if "nccl" in sys.argv else "gloo")
rank = dist.get_rank()
x = torch.ones(3, device=DEVICE)
dist.all_reduce(x)

if fault == "kill":
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    held = torch.ones(1 << 22, device=DEVICE)
    dist.all_reduce(held)
    if attempt == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(held)
    print(f"rank {rank} attempt {attempt}: {held[0].item():.0f}", flush=True)

if fault == "sleeper":
    for step in range(5):
        if rank == 1 and step == 3:
            time.sleep(10**6)  # sleeps
        dist.all_reduce(x)
        x.sum().item()  # NCCL's wait is here

if fault == "uneven":
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(DEVICE))
    for batch in torch.randn(10 if rank == 0 else 9, 8, 4, device=DEVICE):
        model(batch).sum().backward()  # one pass less
    dist.barrier()  # on rank 1

if fault == "drift":
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(DEVICE))  # drifts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model.module(torch.full((8, 4), rank + 1.0, device=DEVICE)).sum().backward()  # past the wrapper
        optimizer.step()

if fault == "visit":
    Path(f"here-{rank}").write_text(str(os.getpid()))
    while not Path("go").exists():
        time.sleep(0.02)
dist.destroy_process_group()
