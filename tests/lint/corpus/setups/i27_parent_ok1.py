import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def find_free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def worker(rank, world, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    port = find_free_port()
    mp.spawn(worker, args=(2, port), nprocs=2)
