import torch
import torch.distributed as dist


def train():
    x = torch.rand(2)
    dist.all_reduce(x)


def main():
    dist.init_process_group("gloo")
    try:
        train()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
