import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(world=2):
    data = torch.randn(100, 3)

    def worker(rank):
        dist.init_process_group("gloo", rank=rank, world_size=world)
        part = data[rank::world].sum()
        dist.all_reduce(part)
        dist.destroy_process_group()

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29565")
    mp.spawn(worker, nprocs=world)


if __name__ == "__main__":
    main()
