import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group(backend="gloo")
    device = torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(device)
    model = DDP(model, [local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(2, 4, device=device)).sum().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
