import torch
import torch.distributed as dist

local = dist.get_node_local_rank()
torch.cuda.set_device(local)
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.manual_seed(1234 + rank)
noise = torch.randn(4, device=f"cuda:{local}")
dist.all_reduce(noise)
dist.destroy_process_group()
