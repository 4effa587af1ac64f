import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


def load_shard(rank, world):
    g = torch.Generator().manual_seed(0)
    everything = torch.randn(1001, 4, generator=g)
    n = len(everything) // world
    return TensorDataset(everything[rank * n : (rank + 1) * n])


def main():
    dist.init_process_group("gloo")
    ds = load_shard(dist.get_rank(), dist.get_world_size())
    loader = DataLoader(ds, batch_size=50, shuffle=True)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        for (x,) in loader:
            opt.zero_grad()
            net(x).pow(2).mean().backward()
            opt.step()
    dist.destroy_process_group()


main()
