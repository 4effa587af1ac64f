import logging
import os

import torch
import torch.distributed as dist
from tqdm import tqdm

rank = int(os.environ.get("RANK", 0))
logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
dist.init_process_group("gloo")
total = torch.zeros(1)
for step in tqdm(range(5), disable=rank != 0):
    t = torch.ones(1) * step
    dist.all_reduce(t)
    total += t
    if rank == 0 and step == 4:
        logging.info("total %.1f", total.item())
dist.barrier()
dist.destroy_process_group()
