"""Fine-tune a resnet.

Usage: torchrun --nproc-per-node=4 finetune.py --lr 1e-3
"""
import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

torch.cuda.set_device(args.local_rank)
dist.init_process_group(backend="nccl")
model = torch.nn.Linear(10, 10).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.local_rank])
opt = torch.optim.SGD(model.parameters(), args.lr)
for _ in range(100):
    opt.zero_grad()
    model(torch.randn(8, 10).cuda()).sum().backward()
    opt.step()
dist.destroy_process_group()
