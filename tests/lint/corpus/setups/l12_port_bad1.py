"""Run me with: torchrun --nproc_per_node=4 --nnodes=2 ... train.py"""
import os

import torch
import torch.distributed as dist


def ddp_setup():
    os.environ["MASTER_ADDR"] = "10.0.0.5"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def main():
    ddp_setup()
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(20, 1).cuda(), device_ids=[int(os.environ["LOCAL_RANK"])]
    )
    model(torch.randn(4, 20).cuda()).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
