import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
shape = torch.zeros(2, dtype=torch.long)
if rank == 0:
    data = torch.randn(3, 5)
    shape = torch.tensor(data.shape)
dist.broadcast(shape, 0)
if rank != 0:
    data = torch.empty(*shape.tolist())
dist.broadcast(data, 0)
dist.destroy_process_group()
