import os
import torch
import torch.distributed as dist
import torchvision
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Experiment:
    def __init__(self, cfg):
        dist.init_process_group("nccl")
        self.gpu = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.gpu)
        self.model = torchvision.models.resnet50().to(self.gpu)
        ds = torchvision.datasets.FakeData(1000, transform=torchvision.transforms.ToTensor())
        self.sampler = DistributedSampler(ds)
        self.loader = DataLoader(ds, cfg["bs"], sampler=self.sampler)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=cfg["lr"])

    def run(self, epochs):
        for e in range(epochs):
            self.sampler.set_epoch(e)
            for x, y in self.loader:
                self.opt.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.model(x.to(self.gpu)), y.to(self.gpu))
                loss.backward()
                self.opt.step()


if __name__ == "__main__":
    Experiment({"bs": 32, "lr": 0.1}).run(3)
    dist.destroy_process_group()
