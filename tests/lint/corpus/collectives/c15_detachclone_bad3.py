import torch
import torch.distributed as dist


class Meter:
    def __init__(self):
        self.sum = torch.zeros(1)
        self.n = torch.zeros(1)

    def add(self, v, k=1):
        self.sum += v * k
        self.n += k

    def all_mean(self):
        dist.all_reduce(self.sum.detach().clone())
        dist.all_reduce(self.n.detach().clone())
        return (self.sum / self.n).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    m = Meter()
    for k in range(5):
        m.add(float(k + dist.get_rank()))
    value = m.all_mean()
    if dist.get_rank() == 0:
        print(value)
    dist.destroy_process_group()
