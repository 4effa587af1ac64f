import torch
import torch.distributed as dist

from trainer import Trainer

dist.init_process_group("gloo")
t = Trainer(torch.nn.Linear(3, 1))
t.fit(20)
dist.destroy_process_group()
