import torch
import torch.distributed as dist


def make_tensor_parallel_groups(tp):
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = None
    for start in range(0, world, tp):
        ranks = list(range(start, start + tp))
        if rank not in ranks:
            continue
        mine = dist.new_group(ranks, backend="gloo")
    return mine


if __name__ == "__main__":
    dist.init_process_group("gloo")
    g = make_tensor_parallel_groups(2)
    t = torch.ones(4)
    dist.all_reduce(t, group=g)
    print(dist.get_rank(), t.tolist())
    dist.destroy_process_group()
