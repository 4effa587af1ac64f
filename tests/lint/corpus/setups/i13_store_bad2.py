import os

import torch
import torch.distributed as dist
from torch.distributed import FileStore


class Worker:
    STORE = "/dev/shm/ps_store"

    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        store = FileStore(self.STORE, self.world)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)

    def step(self):
        g = torch.full((4,), float(self.rank))
        dist.all_reduce(g)
        return g / self.world

    def close(self):
        dist.destroy_process_group()


if __name__ == "__main__":
    w = Worker()
    w.step()
    w.close()
