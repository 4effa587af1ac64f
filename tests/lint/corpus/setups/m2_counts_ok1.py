import torch
import torch.distributed as dist


def global_ratio(num, den):
    t = torch.tensor([float(num), float(den)])
    dist.all_reduce(t)
    return (t[0] / t[1].clamp(min=1)).item()


dist.init_process_group("gloo")
tp = 3 + dist.get_rank()
pos = 10 * (1 + dist.get_rank())
r = global_ratio(tp, pos)
if dist.get_rank() == 0:
    print("recall", r)
dist.destroy_process_group()
