import torch.distributed as dist


def rank():
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_main_process():
    return rank() == 0
