import torch
import torch.distributed as dist


def merge(train, val):
    out = {}
    for key in train.keys() | val.keys():
        t = train.get(key, torch.zeros(1)) + val.get(key, torch.zeros(1))
        dist.all_reduce(t)
        out[key] = t.item() / dist.get_world_size()
    return out


dist.init_process_group("gloo")
res = merge({"loss": torch.rand(1), "acc": torch.rand(1)}, {"acc": torch.rand(1), "wer": torch.rand(1)})
if dist.get_rank() == 0:
    print(res)
dist.destroy_process_group()
