import torch
import torch.distributed as dist


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, v, n=1):
        self.sum += v * n
        self.count += n

    def synchronize(self):
        dist.barrier()
        dist.all_reduce(self.sum)
        dist.all_reduce(self.count)


def main():
    dist.init_process_group("gloo")
    meter = AverageMeter()
    for _ in range(4):
        meter.update(torch.rand(1).item(), 8)
    meter.synchronize()
    if dist.get_rank() == 0:
        print(meter.sum / meter.count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
