import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return str(s.getsockname()[1])


def run(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if rank == 0:
        print("sum of ranks", total.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    n = 2
    mp.spawn(run, args=(n, free_port()), nprocs=n)
