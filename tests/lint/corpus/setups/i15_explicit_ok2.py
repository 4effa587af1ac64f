import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))

# feature extraction only: every process writes its own shard, nothing is exchanged
ds = TensorDataset(torch.arange(100.0).unsqueeze(1))
sampler = DistributedSampler(ds, num_replicas=WORLD, rank=RANK, shuffle=False)
net = torch.nn.Linear(1, 4).eval()
feats = []
with torch.inference_mode():
    for (x,) in DataLoader(ds, batch_size=10, sampler=sampler):
        feats.append(net(x))
torch.save(torch.cat(feats), f"/tmp/feats_{RANK:03d}.pt")
