import torch
import torch.nn as nn
from torch import distributed as td


def sync(model):
    for p in model.parameters():
        td.all_reduce(p, op=td.ReduceOp.SUM)


def main():
    td.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    gen = torch.Generator().manual_seed(td.get_rank())
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(8, 4, generator=gen)).pow(2).mean().backward()
        opt.step()
        sync(model)
    print(td.get_rank(), model.weight.norm().item())
    td.destroy_process_group()


if __name__ == "__main__":
    main()
