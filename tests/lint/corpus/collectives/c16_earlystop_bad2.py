import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def validate(model):
    with torch.no_grad():
        v = model(torch.randn(16, 8)).abs().mean()
    dist.reduce(v, 0, op=dist.ReduceOp.SUM)
    return v.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    for _ in range(6):
        model(torch.randn(4, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
        sched.step(validate(model))
    print(dist.get_rank(), opt.param_groups[0]["lr"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
