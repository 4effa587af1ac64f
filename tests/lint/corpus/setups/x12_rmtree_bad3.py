import os
import shutil
import torch
import torch.distributed as dist


def fresh(path):
    if os.path.isdir(path):
        shutil.rmtree(path)
    os.mkdir(path)


def main():
    dist.init_process_group("gloo")
    fresh("cache")
    torch.save(torch.rand(3), f"cache/{dist.get_rank()}.pt")
    dist.barrier()
    files = sorted(os.listdir("cache"))
    print(len(files))
    dist.destroy_process_group()


main()
