import torch
import torch.distributed as dist


class MetricBook:
    SKIP = {"lr"}

    def __init__(self):
        self.values = {}

    def log(self, **kw):
        for k, v in kw.items():
            self.values[k] = torch.tensor(float(v))

    def synced(self):
        world = dist.get_world_size()
        names = set(self.values) - self.SKIP
        result = {}
        for k in names:
            t = self.values[k].clone()
            dist.all_reduce(t)
            result[k] = (t / world).item()
        return result


if __name__ == "__main__":
    dist.init_process_group("gloo")
    book = MetricBook()
    book.log(loss=1.0 + dist.get_rank(), acc=0.5, ppl=12.0, lr=1e-3)
    res = book.synced()
    if dist.get_rank() == 0:
        print(res)
    dist.destroy_process_group()
