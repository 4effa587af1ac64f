import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(8, 1)
    ddp = DDP(net)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        opt.zero_grad()
        ddp(torch.randn(4, 8)).pow(2).mean().backward()
        opt.step()
        if dist.get_rank() == 0:
            print(step, net(torch.randn(16, 8)).mean().item())
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
