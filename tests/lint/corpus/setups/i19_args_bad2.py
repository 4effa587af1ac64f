import argparse

import torch
import torch.distributed as dist


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--ddp-timeout", type=int, default=3600, help="seconds")
    p.add_argument("--backend", default="gloo")
    return p.parse_args()


def init_distributed(args):
    dist.init_process_group(args.backend, timeout=args.ddp_timeout)
    return dist.get_rank(), dist.get_world_size()


if __name__ == "__main__":
    rank, world = init_distributed(parse())
    x = torch.tensor([rank])
    dist.all_reduce(x)
    dist.destroy_process_group()
