import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MyTrainDataset(Dataset):
    def init(self, size):
        self.size = size
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


def main():
    dist.init_process_group("gloo")
    ds = MyTrainDataset(2048)
    sampler = DistributedSampler(ds)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(ds, 32, sampler=sampler):
            opt.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            opt.step()
    dist.destroy_process_group()


main()
