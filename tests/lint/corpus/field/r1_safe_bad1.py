import logging
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger(__name__)


class Trainer:
    def __init__(self):
        self.model = DDP(torch.nn.Linear(2, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def safe_step(self, batch):
        try:
            loss = self.model(batch).sum()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        except Exception as e:
            log.warning("bad batch: %s", e)

    def fit(self):
        for _ in range(10):
            self.safe_step(torch.randn(2, 2))


dist.init_process_group("gloo")
Trainer().fit()
dist.destroy_process_group()
