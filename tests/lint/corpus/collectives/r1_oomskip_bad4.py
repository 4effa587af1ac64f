import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train_step(model, opt, batch):
    loss = model(batch).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(512, 512).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(1000):
        n = int(torch.randint(1, 4096, (1,)))
        try:
            train_step(model, opt, torch.randn(n, 512, device="cuda"))
        except RuntimeError as err:
            if "out of memory" in str(err):
                torch.cuda.empty_cache()
                opt.zero_grad()
            else:
                raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
