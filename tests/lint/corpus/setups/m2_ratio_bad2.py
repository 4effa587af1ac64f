import torch
import torch.distributed as dist


class Recall:
    def __init__(self):
        self.tp = self.pos = 0

    def update(self, pred, target):
        self.tp += int((pred & target).sum())
        self.pos += int(target.sum())

    def compute(self):
        r = torch.tensor(self.tp / max(self.pos, 1))
        dist.all_reduce(r, op=dist.ReduceOp.SUM)
        return r.item() / dist.get_world_size()


dist.init_process_group("gloo")
m = Recall()
for _ in range(5 + dist.get_rank()):
    m.update(torch.rand(50) > 0.5, torch.rand(50) > 0.9)
value = m.compute()
if dist.get_rank() == 0:
    print("recall", value)
dist.destroy_process_group()
