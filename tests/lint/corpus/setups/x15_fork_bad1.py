import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class OnGpu(Dataset):
    def __init__(self):
        self.x = torch.randn(1000, 8).cuda()

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        return self.x[i] * 2


if __name__ == "__main__":
    mp.set_start_method("fork")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    ds = OnGpu()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 32, sampler=sampler, num_workers=4)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1).cuda(), device_ids=[local])
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in loader:
            opt.zero_grad()
            net(x.cuda()).mean().backward()
            opt.step()
    dist.destroy_process_group()
