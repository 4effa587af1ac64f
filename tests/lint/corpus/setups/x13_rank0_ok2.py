import datetime
import os

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    net(torch.ones(1, 2)).sum().backward()
    if dist.get_rank() == 0:
        folder = f"/tmp/runs/{datetime.datetime.now():%d_%H%M%S}"
        os.makedirs(folder, exist_ok=True)
        torch.save(net.module.state_dict(), f"{folder}/w.pt")
    dist.destroy_process_group()


main()
