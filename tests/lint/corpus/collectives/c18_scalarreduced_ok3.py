import torch
import torch.distributed as dist


class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0

    def update(self, v):
        self.sum += float(v)
        self.n += 1

    def mean(self):
        pair = torch.as_tensor([self.sum, self.n], dtype=torch.float64)
        dist.all_reduce(pair)
        total, n = pair.tolist()
        return total / n


dist.init_process_group("gloo")
m = Meter()
m.update(dist.get_rank())
print(m.mean())
dist.destroy_process_group()
