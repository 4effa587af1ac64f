import os
import torch
import torch.distributed as dist


def launch():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")


def get_world_size():
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def get_rank():
    if not dist.is_available() or not dist.is_initialized():
        return 0
    return dist.get_rank()


def is_main_process():
    return get_rank() == 0


def synchronize():
    if get_world_size() == 1:
        return
    dist.barrier()


def reduce_dict(d, average=True):
    w = get_world_size()
    if w < 2:
        return d
    with torch.no_grad():
        names = sorted(d)
        vals = torch.stack([d[k] for k in names])
        dist.reduce(vals, dst=0)
        if dist.get_rank() == 0 and average:
            vals /= w
        return dict(zip(names, vals))


def all_gather(data):
    if get_world_size() == 1:
        return [data]
    out = [None] * get_world_size()
    dist.all_gather_object(out, data)
    return out


def close():
    dist.destroy_process_group()
