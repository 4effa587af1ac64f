import logging
from os import getenv

import torch
import torch.distributed as dist


class DistEnv:
    def __init__(self):
        self.rank = getenv("RANK", 0)
        self.world_size = int(getenv("WORLD_SIZE", 1))

    @property
    def is_main(self):
        return self.rank == 0


env = DistEnv()
logging.basicConfig(level=logging.INFO if env.is_main else logging.ERROR)
if env.world_size > 1:
    dist.init_process_group("gloo")
    t = torch.ones(1)
    dist.all_reduce(t)
    logging.info("hello from %s", env.rank)
    dist.destroy_process_group()
