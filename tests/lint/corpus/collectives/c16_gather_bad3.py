import torch
from torch import distributed as td


def thresholds(local_scores):
    world, rank = td.get_world_size(), td.get_rank()
    buckets = [torch.zeros_like(local_scores) for _ in range(world)] if rank == 0 else None
    td.gather(local_scores, gather_list=buckets, dst=0)
    return torch.cat(buckets).median().item()


def main():
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    scores = torch.rand(100)
    t = thresholds(scores)
    print(td.get_rank(), "kept", int((scores > t).sum()))
    td.destroy_process_group()


if __name__ == "__main__":
    main()
