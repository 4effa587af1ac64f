import os

import torch
import torch.distributed as dist


def share_files(root):
    files = sorted(os.listdir(root)) if dist.get_rank() == 0 else []
    n = torch.tensor([len(files)])
    dist.broadcast(n, src=0)
    if dist.get_rank() != 0:
        files = [None] * int(n)
    dist.broadcast_object_list(files, src=0)
    return files


dist.init_process_group("gloo")
print(dist.get_rank(), len(share_files("/etc")))
dist.destroy_process_group()
