import torch
import torch.distributed as dist


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def setup():
    dist.init_process_group("gloo")


def main():
    setup()
    if is_main():
        print("training starts")
    x = torch.rand(3)
    dist.all_reduce(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
