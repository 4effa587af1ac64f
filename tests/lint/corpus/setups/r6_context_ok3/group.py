from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def process_group(backend):
    dist.init_process_group(backend)
    try:
        yield dist.get_rank()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
