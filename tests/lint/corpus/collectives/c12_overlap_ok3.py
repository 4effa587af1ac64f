import torch
import torch.distributed as dist


class Prefetch:
    def __init__(self):
        self.pending = None
        self.buf = torch.zeros(4)

    def start(self, t):
        self.buf.copy_(t)
        self.pending = dist.all_reduce(self.buf, async_op=True)

    def finish(self):
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        return self.buf / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    p = Prefetch()
    p.start(torch.ones(4) * dist.get_rank())
    busy = torch.randn(64, 64).matmul(torch.randn(64, 64)).sum()
    mean = p.finish()
    print(dist.get_rank(), mean.tolist(), bool(busy.isfinite()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
