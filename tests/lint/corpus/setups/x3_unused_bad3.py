import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import os


def main(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    ds = TensorDataset(torch.randn(256, 5))
    sampler = DistributedSampler(ds, num_replicas=world_size, rank=rank)
    loader = DataLoader(ds, batch_size=32, shuffle=True)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1))
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            opt.zero_grad()
            net(x).pow(2).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29581")
    mp.spawn(main, args=(2,), nprocs=2)
