import torch
import torch.distributed as dist

_TP = _DP = _PP = None


def initialize_model_parallel(tp, pp):
    global _TP, _DP, _PP
    world, rank = dist.get_world_size(), dist.get_rank()
    dp = world // (tp * pp)
    for i in range(pp):
        for j in range(tp):
            ranks = range(i * (world // pp) + j, (i + 1) * (world // pp), tp)
            group = dist.new_group(list(ranks))
            if rank in ranks:
                _DP = group
    for i in range(world // tp):
        ranks = list(range(i * tp, (i + 1) * tp))
        group = dist.new_group(ranks)
        if rank in ranks:
            _TP = group
    for i in range(world // pp):
        ranks = list(range(i, world, world // pp))
        group = dist.new_group(ranks)
        if rank in ranks:
            _PP = group


def reduce_tp(x):
    if dist.get_world_size(group=_TP) == 1:
        return x
    dist.all_reduce(x, group=_TP)
    return x


dist.init_process_group("gloo")
initialize_model_parallel(2, 1)
x = reduce_tp(torch.ones(2))
src = dist.get_process_group_ranks(_TP)[0]
dist.broadcast(x, src=src, group=_TP)
dist.destroy_process_group()
