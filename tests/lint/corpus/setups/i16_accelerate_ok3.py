import torch
import torch.distributed as dist
from accelerate import Accelerator

dist.init_process_group("gloo")
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(3, 3))
model(torch.randn(2, 3)).sum().backward()
accelerator.print("done on", accelerator.num_processes)
dist.destroy_process_group()
