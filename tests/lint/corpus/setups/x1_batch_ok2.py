import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def new_epoch(loader, epoch):
    inner = loader.batch_sampler.sampler
    if hasattr(inner, "set_epoch"):
        inner.set_epoch(epoch)


def main():
    dist.init_process_group("gloo")
    ds = TensorDataset(torch.randn(64, 4))
    loader = DataLoader(ds, batch_sampler=BatchSampler(DistributedSampler(ds), 8, drop_last=True))
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(3):
        new_epoch(loader, epoch)
        for (x,) in loader:
            opt.zero_grad()
            net(x).mean().backward()
            opt.step()
    dist.destroy_process_group()


main()
