import torch
import torch.distributed as dist


def build_groups():
    r, w = dist.get_rank(), dist.get_world_size()
    members = list(range(w // 2)) if r < w // 2 else list(range(w // 2, w))
    return dist.new_group(ranks=members)


def main():
    dist.init_process_group("gloo")
    grp = build_groups()
    x = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(x, group=grp)
    print(dist.get_rank(), x.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
