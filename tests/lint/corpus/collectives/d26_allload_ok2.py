import copy
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(8, 1))
    if len(sys.argv) > 1:
        model.module.load_state_dict(torch.load(sys.argv[1], map_location="cpu", weights_only=True))
    ema = copy.deepcopy(model.module).requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        opt.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.module.parameters()):
                e.lerp_(p, 0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
