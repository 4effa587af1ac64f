import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, accum):
        self.model = DDP(model)
        self.accum = accum
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def _backward(self, x):
        loss = self.model(x).square().mean() / self.accum
        loss.backward()

    def run(self, batches):
        for i, x in enumerate(batches, start=1):
            with self.model.no_sync():
                self._backward(x)
            if i % self.accum == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.opt.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    Trainer(nn.Linear(8, 1), 4).run([torch.randn(4, 8) for _ in range(16)])
    dist.destroy_process_group()
