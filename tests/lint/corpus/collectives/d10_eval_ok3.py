import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(4, 2).to(device), device_ids=[device.index])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.train()
        opt.zero_grad()
        model(torch.randn(2, 4).to(device)).sum().backward()
        opt.step()
        model.eval()
        with torch.no_grad():
            out = model(torch.randn(2, 4).to(device)).cpu()
    print(dist.get_rank(), out.shape)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
