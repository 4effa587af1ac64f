import torch
import torch.distributed as dist


def concat_all_gather(tensor):
    parts = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor, async_op=False)
    return torch.cat(parts, dim=0)
