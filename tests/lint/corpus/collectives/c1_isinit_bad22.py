import dataclasses
import os

import torch
import torch.distributed as dist


@dataclasses.dataclass
class Env:
    rank: int
    world_size: int

    @classmethod
    def from_environ(cls):
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    @property
    def is_main(self):
        return self.rank == 0


def main():
    env = Env.from_environ()
    dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size)
    counts = torch.zeros(env.world_size)
    counts[env.rank] = 1
    if env.is_main:
        dist.all_reduce(counts)
        print(counts.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
