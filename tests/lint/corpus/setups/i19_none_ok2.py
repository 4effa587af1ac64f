import torch
import torch.distributed as dist


def init(backend="gloo", timeout=None):
    dist.init_process_group(backend, timeout=timeout)


init()
handle = dist.all_reduce(torch.ones(2), async_op=True)
handle.wait()
dist.destroy_process_group()
