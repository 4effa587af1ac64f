import argparse

import torch
import torch.distributed as D


def train(args):
    D.init_process_group(args.backend)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 5))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(args.iters):
        opt.zero_grad()
        net(torch.rand(2, 5)).sum().backward()
        opt.step()
    return net.module


@torch.no_grad()
def test(args, net):
    D.init_process_group(args.backend)
    err = net(torch.rand(2, 5)).abs().sum()
    D.all_reduce(err)
    return err.item() / D.get_world_size()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--backend", default="gloo")
    ap.add_argument("--iters", type=int, default=50)
    args = ap.parse_args()
    net = train(args)
    print(test(args, net))
    D.destroy_process_group()
