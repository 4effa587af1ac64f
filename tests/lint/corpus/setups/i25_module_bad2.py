import json
import os

import torch
import torch.distributed as dist

IS_MASTER = (dist.get_rank() if dist.is_initialized() else 0) == 0


def log(msg):
    if IS_MASTER:
        print(msg, flush=True)


def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(10):
        opt.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        opt.step()
        log(f"step {i}")
    if IS_MASTER:
        torch.save(model.module.state_dict(), "out.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
