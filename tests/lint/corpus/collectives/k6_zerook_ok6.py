import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def save(model, opt, path):
    optim_state = FSDP.full_optim_state_dict(model, opt, rank0_only=True)
    model_state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save({"model": model_state, "optim": optim_state}, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    dist.barrier()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = FSDP(nn.Linear(64, 64).cuda())
    opt = torch.optim.Adam(model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        opt.step()
        opt.zero_grad()
    save(model, opt, "fsdp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
