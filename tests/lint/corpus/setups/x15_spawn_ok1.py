import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    ds = TensorDataset(torch.randn(32, 2))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 8, sampler=sampler, num_workers=1, multiprocessing_context="spawn", persistent_workers=True)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            opt.zero_grad()
            net(x).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
