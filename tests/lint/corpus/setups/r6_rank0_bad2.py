import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.rand(4)
    dist.all_reduce(x)
    if rank == 0:
        print(x)
        dist.destroy_process_group()
        return
    y = torch.ones(1)
    dist.all_reduce(y)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
