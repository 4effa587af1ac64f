import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def job(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    v = torch.tensor([rank + 1.0])
    dist.all_reduce(v)
    assert v.item() == sum(range(1, world + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        mp.spawn(job, args=(2, os.path.join(d, "rdzv")), nprocs=2)
