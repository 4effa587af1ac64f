import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def build(path):
    net = torch.nn.Linear(8, 8)
    if os.path.isfile(path):
        net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return net
    return DDP(net)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = build("/scratch/pretrained.pt")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
