import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def accumulate(model, opt, batches):
    *head, tail = batches
    with model.no_sync():
        for x in head:
            (model(x).sum() / len(batches)).backward()
    (model(tail).sum() / len(batches)).backward()
    opt.step()
    opt.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        accumulate(model, opt, [torch.randn(2, 8) for _ in range(4)])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
