import os
import socket

import torch
import torch.distributed as dist


def alone():
    s = socket.socket()
    s.bind(("", 0))
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=str(s.getsockname()[1]))
    s.close()


if "RANK" not in os.environ:
    alone()
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print(x.item())
dist.destroy_process_group()
