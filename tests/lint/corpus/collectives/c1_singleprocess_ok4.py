import torch
import torch.distributed as dist


def get_world_size():
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def is_main_process():
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def reduce_mean(value):
    world = get_world_size()
    if world < 2:
        return value
    with torch.no_grad():
        value = value.clone()
        dist.all_reduce(value)
        return value / world


def main():
    if torch.distributed.is_torchelastic_launched():
        dist.init_process_group("gloo")
    loss = torch.rand(1)
    mean = reduce_mean(loss)
    if is_main_process():
        print("mean loss", mean.item())
    if get_world_size() > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
