import copy
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def export(model):
    exported = copy.deepcopy(model.module).cpu().eval()
    torch.jit.save(torch.jit.script(exported), "export.ts")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(4, 4).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        opt.step()
    if dist.get_rank() == 0:
        export(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
