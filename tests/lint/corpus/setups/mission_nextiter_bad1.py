import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, loader, gpu):
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.loader, self.gpu = loader, gpu
        self.opt = torch.optim.SGD(model.parameters(), 1e-3)

    def _run_epoch(self, epoch):
        b_sz = len(next(iter(self.loader))[0])
        print(f"[GPU{self.gpu}] Epoch {epoch} | Batchsize: {b_sz} | Steps: {len(self.loader)}")
        self.loader.sampler.set_epoch(epoch)
        for x, y in self.loader:
            self.opt.zero_grad()
            torch.nn.functional.mse_loss(self.model(x), y).backward()
            self.opt.step()

    def train(self, n):
        for e in range(n):
            self._run_epoch(e)


dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(256, 20), torch.randn(256, 1))
Trainer(torch.nn.Linear(20, 1), DataLoader(ds, 32, sampler=DistributedSampler(ds)), dist.get_rank()).train(3)
dist.destroy_process_group()
