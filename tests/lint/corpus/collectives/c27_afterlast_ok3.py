import torch
import torch.distributed as dist


def report(values):
    total = torch.stack(values).sum()
    dist.all_reduce(total)
    if dist.get_rank() != 0:
        return
    print("total", total.item())


def main():
    dist.init_process_group("gloo")
    report([torch.rand(()) for _ in range(3)])
    dist.destroy_process_group()


main()
