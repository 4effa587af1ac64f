import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self):
        self.gpu = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        net = torchvision.models.resnet50(num_classes=100).cuda(self.gpu)
        self.model = DistributedDataParallel(net, device_ids=[self.gpu])
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self):
        x = torch.randn(8, 3, 224, 224, device=self.gpu)
        y = torch.randint(0, 100, (8,), device=self.gpu)
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        out = self.model(torch.randn(16, 3, 224, 224, device=self.gpu))
        self.model.train()
        return out.softmax(-1).amax(-1).mean().item()

    def fit(self, epochs):
        for ep in range(epochs):
            for _ in range(100):
                self.step()
            if self.rank == 0:
                print(ep, self.validate())
            dist.barrier()


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    Trainer().fit(10)
    dist.destroy_process_group()
