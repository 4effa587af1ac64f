import torch
import torch.distributed as dist

from conf import SYNC_FILE, WORLD
import torch.multiprocessing as mp


def job(rank):
    dist.init_process_group("gloo", init_method="file://" + SYNC_FILE, rank=rank, world_size=WORLD)
    v = torch.tensor(rank)
    dist.all_reduce(v)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(job, nprocs=WORLD)
