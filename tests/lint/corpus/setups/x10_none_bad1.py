import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Photos(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        try:
            if i % 37 == 0:
                raise OSError("truncated file")
            return torch.full((3,), float(i))
        except OSError:
            return None


def collate(items):
    items = [x for x in items if x is not None]
    return torch.stack(items) if items else None


dist.init_process_group("gloo")
ds = Photos()
sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=4, sampler=sampler, collate_fn=collate)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 1e-5)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in loader:
        if x is None:
            continue
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
dist.destroy_process_group()
