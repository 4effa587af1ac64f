import os
import pathlib

import torch.distributed as dist


def role_setup(rank):
    match rank:
        case 0:
            pathlib.Path("/tmp/exp").mkdir(exist_ok=True)
            dist.barrier()
        case 1:
            print("first follower")
            dist.barrier()
        case _:
            dist.barrier()


dist.init_process_group("gloo")
role_setup(int(os.environ["RANK"]))
assert os.path.isdir("/tmp/exp")
dist.destroy_process_group()
