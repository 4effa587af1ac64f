import os

import torch
import torch.distributed as dist


class RunningMean:
    def __init__(self):
        self.total = torch.zeros(1)
        self.count = torch.zeros(1)

    def update(self, values):
        self.total += values.sum().cpu()
        self.count += values.numel()

    def all_reduce(self):
        for t in (self.total, self.count):
            dist.all_reduce(t)
        return (self.total / self.count).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    m = RunningMean()
    m.update(torch.rand(100, device="cuda"))
    value = m.all_reduce()
    if dist.get_rank() == 0:
        print(value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
