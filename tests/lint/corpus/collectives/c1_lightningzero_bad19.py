import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only


@rank_zero_only
def finish(message):
    dist.barrier()
    print(message)


def main():
    dist.init_process_group("gloo")
    rank_zero_only.rank = dist.get_rank()
    finish("all done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
