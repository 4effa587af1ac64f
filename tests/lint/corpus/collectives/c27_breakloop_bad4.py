import torch
import torch.distributed as dist


def search(gen, steps=50):
    for step in range(steps):
        x = torch.rand(1, generator=gen)
        if float(x) > 0.9:
            print(dist.get_rank(), "hit at", step)
            break
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return step


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(dist.get_rank())
    search(g)
    dist.destroy_process_group()


main()
