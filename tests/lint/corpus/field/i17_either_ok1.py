import argparse
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("nccl")
    rank, local, world = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{local}"
    torch.cuda.set_device(device)
    master = rank == 0
else:
    rank, local, world, master = 0, 0, 1, True
    device = "cuda" if torch.cuda.is_available() else "cpu"
if master:
    os.makedirs("out", exist_ok=True)
torch.manual_seed(1337 + rank)
ds = TensorDataset(torch.randn(100, 4))
sampler = DistributedSampler(ds) if ddp else RandomSampler(ds)
loader = DataLoader(ds, 4, sampler=sampler)
net = torch.nn.Linear(4, 1).to(device)
if ddp:
    net = DDP(net, device_ids=[local])
raw = net.module if ddp else net
opt = torch.optim.AdamW(raw.parameters(), lr=1e-3)
ACC = 2
for epoch in range(5):
    if ddp:
        sampler.set_epoch(epoch)
    for i, (x,) in enumerate(loader):
        if ddp:
            net.require_backward_grad_sync = i % ACC == ACC - 1
        loss = net(x.to(device)).pow(2).mean() / ACC
        loss.backward()
        if i % ACC == ACC - 1:
            opt.step()
            opt.zero_grad(set_to_none=True)
        if master and i % 10 == 0:
            print(epoch, i, loss.item() * ACC)
    if master:
        torch.save(raw.state_dict(), "out/last.pt")
if ddp:
    dist.destroy_process_group()
