import time

import torch
from torch import distributed as td


class synced_timer:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.start = time.perf_counter()
        return self

    def __exit__(self, *exc):
        td.barrier()
        if td.get_rank() == 0:
            print(self.name, time.perf_counter() - self.start)
        return False


def main():
    td.init_process_group("gloo")
    with synced_timer("matmul"):
        a = torch.randn(256, 256) @ torch.randn(256, 256)
        td.all_reduce(a)
    td.destroy_process_group()


if __name__ == "__main__":
    main()
