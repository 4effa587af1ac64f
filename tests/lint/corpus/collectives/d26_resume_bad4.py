import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def resume(model, folder):
    path = os.path.join(folder, "last.pt")
    if os.path.exists(path) and dist.get_rank() == 0:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(ckpt["model"])
        return ckpt["step"]
    return 0


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 1))
    start = resume(model, "/scratch/run")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    print("start at", start)
    for _ in range(20):
        opt.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        opt.step()
    dist.destroy_process_group()


main()
