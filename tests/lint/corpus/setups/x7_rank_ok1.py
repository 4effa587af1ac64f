import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, n, rank, world):
        self.n, self.rank, self.world = n, rank, world

    def __iter__(self):
        info = get_worker_info()
        workers, wid = (info.num_workers, info.id) if info else (1, 0)
        first = self.rank * workers + wid
        for i in range(first, self.n, self.world * workers):
            yield torch.tensor([float(i)])


def main():
    dist.init_process_group("gloo")
    ds = Stream(64, dist.get_rank(), dist.get_world_size())
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    opt = torch.optim.SGD(net.parameters(), 1e-6)
    for x in DataLoader(ds, batch_size=8, num_workers=2):
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
