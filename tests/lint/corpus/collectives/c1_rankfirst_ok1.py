import os

import torch.distributed as dist


def download(path):
    if not os.path.exists(path):
        with open(path, "w") as f:
            f.write("1 2 3\n")


def get_dataset(path):
    if dist.get_rank() != 0:
        dist.barrier()
    download(path)
    if dist.get_rank() == 0:
        dist.barrier()
    with open(path) as f:
        return [int(v) for v in f.read().split()]


dist.init_process_group("gloo")
print(dist.get_rank(), get_dataset("/tmp/numbers.txt"))
dist.destroy_process_group()
