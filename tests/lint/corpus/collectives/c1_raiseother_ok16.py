import os

import torch
import torch.distributed as dist


def main():
    if "RANK" not in os.environ:
        raise SystemExit("start me with torchrun")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank >= world:
        raise RuntimeError("impossible")
    if world % 2:
        if rank == 0:
            print("need an even number of processes")
        dist.destroy_process_group()
        return
    t = torch.ones(1)
    dist.all_reduce(t)
    print(rank, t.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
