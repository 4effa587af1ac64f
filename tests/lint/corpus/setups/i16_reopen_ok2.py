import torch
import torch.distributed as dist


def stage(seed):
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(seed)
        t = torch.rand(1)
        dist.all_reduce(t)
    finally:
        dist.destroy_process_group()


def main():
    for seed in (1, 2):
        stage(seed)


if __name__ == "__main__":
    main()
