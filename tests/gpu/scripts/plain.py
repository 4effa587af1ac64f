"""An ordinary script for one GPU, which knows nothing of rankwise; what it prints must not tell how it was started."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

DEVICE = os.environ.get("RANKWISE_TEST_DEVICE", "cuda")
backend = sys.argv[1]
torch.use_deterministic_algorithms(True)
if DEVICE == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name())
    print("forked badly:", torch.cuda._is_in_bad_fork(), "seed:", torch.cuda.initial_seed())
dist.init_process_group(None if backend == "default" else backend)
print(dist.get_backend_config())
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(64, 8).to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(5):
    loss = torch.nn.functional.dropout(model(torch.randn(32, 64, device=DEVICE))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    print(f"{loss.item():.9f}")
if DEVICE == "cuda":
    print("allocated:", torch.cuda.memory_allocated() > 0)
if "stay" not in sys.argv:
    dist.destroy_process_group()
