import os
import time

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
start = time.perf_counter()
warm = torch.zeros(1, device="cuda")
dist.all_reduce(warm)
torch.cuda.synchronize()
if dist.get_rank() == 0:
    print(f"communicator ready in {time.perf_counter() - start:.1f}s")
dist.destroy_process_group()
