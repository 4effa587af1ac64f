"""torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint $HEAD:29400 run.py"""
import os

import torch
import torch.distributed as dist


def init():
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    dist.init_process_group("gloo")


def main():
    init()
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    count = torch.ones(1)
    dist.all_reduce(count)
    if dist.get_rank() == 0:
        print(f"{int(count)} processes on {nodes} nodes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
