import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, train_loader, optimizer, gpu_id, save_step):
        self.gpu_id = gpu_id,
        self.train_loader = train_loader,
        self.optimizer = optimizer
        self.save_step = save_step
        self.model = DDP(model, device_ids=[self.gpu_id])

    def train(self, epochs):
        for epoch in range(epochs):
            self.train_loader.sampler.set_epoch(epoch)
            for x, y in self.train_loader:
                self.optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(x.to(self.gpu_id)), y.to(self.gpu_id)).backward()
                self.optimizer.step()


if __name__ == "__main__":
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    ds = TensorDataset(torch.randn(2048, 20), torch.randn(2048, 1))
    net = torch.nn.Linear(20, 1).cuda()
    Trainer(net, DataLoader(ds, 32, sampler=DistributedSampler(ds)), torch.optim.SGD(net.parameters(), 1e-3), local, 1).train(5)
    dist.destroy_process_group()
