from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def torch_distributed_zero_first(local_rank):
    initialized = dist.is_available() and dist.is_initialized()
    if initialized and local_rank not in {-1, 0}:
        dist.barrier()
    yield
    if initialized and local_rank == 0:
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torch_distributed_zero_first(rank):
        with open("/tmp/zero_first.txt", "a") as f:
            f.write(f"{rank}\n")
    print("done", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
