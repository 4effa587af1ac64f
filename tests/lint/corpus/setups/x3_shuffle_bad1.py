import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
train_set = TensorDataset(torch.randn(10000, 32), torch.randint(0, 10, (10000,)))
train_loader = DataLoader(train_set, batch_size=128, shuffle=True, num_workers=2)
model = DDP(nn.Linear(32, 10).cuda(), device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(5):
    for x, y in train_loader:
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
