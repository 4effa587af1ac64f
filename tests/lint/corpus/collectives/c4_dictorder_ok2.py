import torch
import torch.distributed as dist


def average(named):
    for _, tensor in named.items():
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())
    return {k: t.item() for k, t in named.items()}


def main():
    dist.init_process_group("gloo")
    stats = {"loss": torch.rand(1), "acc": torch.rand(1)}
    stats["f1"] = torch.rand(1)
    final = average(stats)
    if dist.get_rank() == 0:
        print(final)
    dist.destroy_process_group()


main()
