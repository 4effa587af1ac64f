from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def torch_distributed_zero_first(rank):
    """Let the first process do something before the others."""
    if rank not in [-1, 0]:
        dist.barrier()
    yield


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torch_distributed_zero_first(rank):
        weights = torch.hub.load_state_dict_from_url("https://example.com/w.pth", map_location="cpu")
    print(rank, len(weights))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
