from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(minutes=30))
pulse = dist.new_group(timeout=timedelta(minutes=2))
flag = torch.zeros(1)
dist.all_reduce(flag, group=pulse)
work = torch.rand(10)
dist.all_reduce(work)
dist.destroy_process_group()
