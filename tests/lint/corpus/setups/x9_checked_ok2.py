import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 4


def main():
    dist.init_process_group("gloo")
    ds = TensorDataset(torch.randn(64, 2))
    if len(ds) < BATCH * dist.get_world_size():
        raise SystemExit(f"{len(ds)} samples are too few for {dist.get_world_size()} ranks")
    sampler = DistributedSampler(ds)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(ds, BATCH, sampler=sampler, drop_last=True):
            opt.zero_grad()
            net(x).sum().backward()
            opt.step()
    dist.destroy_process_group()


main()
