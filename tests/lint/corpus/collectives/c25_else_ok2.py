import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    try:
        t = torch.ones(1)
        dist.all_reduce(t)
    except RuntimeError as e:
        print("collective failed:", e)
        raise
    else:
        dist.barrier()
        print(dist.get_rank(), t.item())
    dist.destroy_process_group()


main()
