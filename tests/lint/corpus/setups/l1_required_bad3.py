import argparse

import torch
import torch.distributed as dist


class Options:
    def __init__(self):
        p = argparse.ArgumentParser("pose")
        p.add_argument("--local_rank", required=True, type=int)
        p.add_argument("--epochs", type=int, default=10)
        self.ns = p.parse_args()


if __name__ == "__main__":
    o = Options().ns
    torch.cuda.set_device(o.local_rank)
    dist.init_process_group("nccl")
    t = torch.ones(1).cuda()
    dist.all_reduce(t)
    dist.destroy_process_group()
