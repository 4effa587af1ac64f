import os
import sys

import torch
from torch import distributed as dist

ENV = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "NCCL_DEBUG": "WARN"}


def main(argv):
    os.environ.update(ENV)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    buf = torch.full((4,), float(rank), device="cuda")
    dist.all_reduce(buf)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
