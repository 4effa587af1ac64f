import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


def main():
    dist.init_process_group("gloo")
    train = datasets.MNIST("../data", train=True, download=True, transform=transforms.ToTensor())
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)))
    opt = torch.optim.Adadelta(net.parameters())
    for epoch in range(1, 4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
