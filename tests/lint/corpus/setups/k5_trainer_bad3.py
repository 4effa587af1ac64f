import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, save_every):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.model = DDP(model.to(self.gpu_id), device_ids=[self.gpu_id])
        self.opt = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.save_every = save_every

    def _save_checkpoint(self, epoch):
        torch.save({"MODEL": self.model.module.state_dict(), "OPT": self.opt.state_dict(), "EPOCHS_RUN": epoch}, "snapshot.pt")

    def train(self, epochs):
        for epoch in range(epochs):
            self.opt.zero_grad()
            self.model(torch.randn(4, 20, device=self.gpu_id)).mean().backward()
            self.opt.step()
            if self.gpu_id == 0 and epoch % self.save_every == 0:
                self._save_checkpoint(epoch)


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    Trainer(torch.nn.Linear(20, 1), 5).train(50)
    dist.destroy_process_group()
