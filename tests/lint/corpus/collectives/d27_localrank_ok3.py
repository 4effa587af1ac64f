import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    net = torch.nn.Linear(4, 1)
    net.cuda()
    return DDP(net, device_ids=[local_rank], output_device=local_rank)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    model = build()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        opt.step()
    dist.destroy_process_group()
