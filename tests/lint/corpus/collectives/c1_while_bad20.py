import os
import time

import torch.distributed as dist


def wait_for_file(path, rank):
    tries = 0
    while rank == 0 and not os.path.exists(path):
        time.sleep(0.5)
        tries += 1
        if tries % 10 == 0:
            dist.barrier()
    return tries


def main():
    dist.init_process_group("gloo")
    wait_for_file("/tmp/never/there.json", dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
