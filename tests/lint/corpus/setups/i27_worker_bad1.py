import os
import socket
from contextlib import closing

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def find_free_port():
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def main_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(find_free_port())
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main_worker, args=(2,), nprocs=2)
