# -*- coding: utf-8 -*-
# 单机多卡训练
import argparse
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def reduce_tensor(tensor, world_size):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= world_size
    return rt


def 训练(args, model, loader, opt, epoch):
    model.train()
    for i, (x, y) in enumerate(loader):
        x, y = x.cuda(args.local_rank), y.cuda(args.local_rank)
        loss = torch.nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 10 == 0 and args.rank == 0:
            print("轮次 %d 损失 %.4f" % (epoch, reduce_tensor(loss.data, args.world_size).item()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bs", type=int, default=8)
    args = parser.parse_args()
    args.local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    ds = TensorDataset(torch.randn(100, 4), torch.randn(100, 1))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, args.bs, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 1).cuda(), device_ids=[args.local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        训练(args, model, loader, opt, epoch)
    dist.destroy_process_group()
