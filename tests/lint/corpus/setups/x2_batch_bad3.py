import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


class Data:
    def __init__(self, bs):
        self.ds = TensorDataset(torch.arange(40.0))
        self.sampler = DistributedSampler(self.ds)
        self.bs = bs

    def loader(self):
        batches = BatchSampler(self.sampler, self.bs, True)
        return DataLoader(self.ds, batch_sampler=batches, batch_size=self.bs, shuffle=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    d = Data(4)
    for (x,) in d.loader():
        s = x.sum()
        dist.all_reduce(s)
    dist.destroy_process_group()
