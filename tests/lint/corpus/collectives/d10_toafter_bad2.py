import os

import torch
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


def build(device):
    net = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.GELU(), torch.nn.Linear(10, 1))
    net = DistributedDataParallel(net)
    return net.to(device)


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    td.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(td.get_rank())
    net = build(device)
    opt = torch.optim.Adam(net.parameters())
    for _ in range(50):
        opt.zero_grad()
        net(torch.randn(4, 10, device=device)).mean().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
