import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
n = 37
ds = TensorDataset(torch.arange(n))
loader = DataLoader(ds, batch_size=4, sampler=DistributedSampler(ds, shuffle=False))
local = {int(i): float(i) ** 2 for (idx,) in loader for i in idx}
boxes = [None] * dist.get_world_size()
dist.all_gather_object(boxes, local)
merged = {}
for box in boxes:
    merged.update(box)
assert len(merged) == n
dist.destroy_process_group()
