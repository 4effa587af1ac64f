import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, snapshot_path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        self.model = model.to(self.local_rank)
        self.opt = torch.optim.SGD(self.model.parameters(), 0.01)
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.model = DDP(self.model, device_ids=[self.local_rank])

    def _load_snapshot(self, path):
        snap = torch.load(path, map_location=f"cuda:{self.local_rank}")
        self.model.load_state_dict(snap["MODEL_STATE"])
        self.opt.load_state_dict(snap["OPT"])
        self.epochs_run = snap["EPOCHS_RUN"] + 1

    def _save_snapshot(self, epoch):
        snap = {"MODEL_STATE": self.model.module.state_dict(), "OPT": self.opt.state_dict(), "EPOCHS_RUN": epoch}
        torch.save(snap, self.snapshot_path)

    def train(self, n):
        for epoch in range(self.epochs_run, n):
            self.opt.zero_grad()
            self.model(torch.randn(8, 4, device=self.local_rank)).mean().backward()
            self.opt.step()
            if self.rank == 0:
                self._save_snapshot(epoch)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
Trainer(torch.nn.Linear(4, 1), "snapshot.pt").train(10)
dist.destroy_process_group()
