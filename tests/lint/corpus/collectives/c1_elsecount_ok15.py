import torch
import torch.distributed as dist


def contribute(rank):
    if rank == 0:
        t = torch.tensor([10.0])
        print("coordinator")
        dist.all_reduce(t)
    elif rank == 1:
        t = torch.tensor([1.0])
        dist.all_reduce(t)
    else:
        t = torch.zeros(1)
        dist.all_reduce(t)
    return t.item()


dist.init_process_group("gloo")
print(contribute(dist.get_rank()))
dist.destroy_process_group()
