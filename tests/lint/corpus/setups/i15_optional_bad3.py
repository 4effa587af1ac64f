import argparse

import torch
import torch.distributed as dist


def reduce_mean(t):
    t = t.clone()
    dist.all_reduce(t)
    return t / dist.get_world_size()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--distributed", action="store_true")
    p.add_argument("--epochs", type=int, default=5)
    args = p.parse_args()
    if args.distributed:
        dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(args.epochs):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        avg = reduce_mean(loss.detach())
        print(epoch, avg.item())
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
