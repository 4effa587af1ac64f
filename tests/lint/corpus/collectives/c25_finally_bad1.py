import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, batches):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(4, 1))
    try:
        train(model, [torch.randn(2, 4) for _ in range(10)])
    finally:
        # leave together
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
