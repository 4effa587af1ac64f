import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

MAX_LEN = 512


def train_epoch(net, loader, opt):
    for ids in loader:
        if ids.shape[1] > MAX_LEN:
            continue
        opt.zero_grad()
        net(ids.float().mean(1, keepdim=True)).sum().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 100, (int(n),), generator=g) for n in torch.randint(10, 700, (200,), generator=g)]
    sampler = DistributedSampler(texts)
    loader = DataLoader(texts, batch_size=1, sampler=sampler)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    opt = torch.optim.SGD(net.parameters(), 1e-6)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_epoch(net, loader, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
