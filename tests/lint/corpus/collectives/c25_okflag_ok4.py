import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    finished = False
    try:
        t = torch.ones(1)
        dist.all_reduce(t)
        finished = True
    finally:
        if finished:
            dist.barrier()
        dist.destroy_process_group()
    print(t.item())


if __name__ == "__main__":
    main()
