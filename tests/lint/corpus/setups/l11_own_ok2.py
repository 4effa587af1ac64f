import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def child(rank, gpus, port):
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(gpus))
    x = torch.ones(1, device="cuda:0")
    dist.all_reduce(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    gpus = ["4", "5"]
    mp.spawn(child, args=(gpus, port), nprocs=len(gpus))
