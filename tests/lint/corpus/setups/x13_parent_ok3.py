import os
import time
import uuid

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, world, out):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    t0 = time.time()
    x = torch.ones(1)
    dist.all_reduce(x)
    torch.save({"seconds": time.time() - t0}, f"{out}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29593")
    out = f"/tmp/run_{uuid.uuid4().hex}"
    os.makedirs(out)
    mp.spawn(run, args=(2, out), nprocs=2)
