import os

import torch
import torch.distributed as dist


def world_size():
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def average(t):
    if world_size() == 1:
        return t
    t = t.clone()
    dist.all_reduce(t)
    return t / world_size()


def main():
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group("gloo")
    value = average(torch.rand(1))
    if not distributed or dist.get_rank() == 0:
        print("mean", value.item())
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
