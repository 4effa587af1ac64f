import traceback

import torch
import torch.distributed as dist


def work(rank):
    t = torch.ones(4) * rank
    dist.all_reduce(t)
    if not torch.isfinite(t).all():
        raise ValueError("bad values")
    return t.sum().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        print(rank, work(rank))
    except Exception:
        traces = [None] * dist.get_world_size()
        dist.all_gather_object(traces, traceback.format_exc())
        if rank == 0:
            print("\n".join(t for t in traces if t))
        raise
    dist.destroy_process_group()


main()
