from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Cfg:
    timeout: object = 900
    loader_timeout: int = 60

    def __post_init__(self):
        if not isinstance(self.timeout, timedelta):
            self.timeout = timedelta(seconds=self.timeout)


cfg = Cfg()
dist.init_process_group("gloo", timeout=cfg.timeout)
ds = TensorDataset(torch.arange(32.0))
loader = DataLoader(ds, batch_size=4, num_workers=1, timeout=cfg.loader_timeout, sampler=DistributedSampler(ds, shuffle=False, drop_last=True))
total = torch.stack([x.sum() for (x,) in loader]).sum()
dist.all_reduce(total)
dist.destroy_process_group()
