import torch
from torch import distributed as td


def total(value):
    t = torch.tensor([float(value)])
    td.reduce(t, dst=td.get_rank(), op=td.ReduceOp.SUM)
    return t.item()


def main():
    td.init_process_group("gloo")
    print(td.get_rank(), total(td.get_rank() + 1))
    td.destroy_process_group()


if __name__ == "__main__":
    main()
