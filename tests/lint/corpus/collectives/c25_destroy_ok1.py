import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    try:
        t = torch.ones(1)
        dist.all_reduce(t)
        print(t.item())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
