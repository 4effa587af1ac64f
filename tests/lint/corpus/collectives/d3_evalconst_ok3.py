import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def masked_error(pred, target, mask):
    if not mask.any():
        return torch.tensor(0.0)
    return (pred - target)[mask].abs().mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(4, 4)).pow(2).mean().backward()
        opt.step()
    with torch.no_grad():
        err = masked_error(model(torch.randn(4, 4)), torch.zeros(4, 1), torch.rand(4, 1) > 0.9)
    dist.all_reduce(err)
    if dist.get_rank() == 0:
        print("error", err.item() / dist.get_world_size())
    dist.destroy_process_group()


main()
