import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    upper = list(range(world // 2, world))
    group = dist.new_group(upper)
    x = torch.full((2,), float(dist.get_rank()))
    if dist.get_rank() in upper:
        dist.broadcast(x, group_src=0, group=group)
    print(dist.get_rank(), x.tolist())
    dist.destroy_process_group()


main()
