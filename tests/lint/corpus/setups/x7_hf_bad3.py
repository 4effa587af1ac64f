import os

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.utils.data import DataLoader

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
stream = load_dataset("allenai/c4", "en", split="train", streaming=True)
stream = stream.shuffle(buffer_size=10_000, seed=0).with_format("torch")
loader = DataLoader(stream, batch_size=8)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(256, 8).cuda(), device_ids=[local_rank])
opt = torch.optim.SparseAdam(model.parameters()) if False else torch.optim.Adam(model.parameters())
for i, batch in enumerate(loader):
    ids = torch.tensor([list(t.encode())[:32] + [0] * max(0, 32 - len(t.encode())) for t in batch["text"]]).cuda()
    opt.zero_grad()
    model(ids).pow(2).mean().backward()
    opt.step()
    if i == 1000:
        break
dist.destroy_process_group()
