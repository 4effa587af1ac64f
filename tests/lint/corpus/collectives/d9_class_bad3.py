import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision.models import resnet18


class Finetune:
    def __init__(self, local_rank):
        net = resnet18(num_classes=10)
        net.requires_grad_(False)
        net.fc.requires_grad_(True)
        self.model = DDP(net.cuda(), device_ids=[local_rank])
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def on_epoch_start(self, epoch):
        if epoch == 5:
            self.model.module.layer4.requires_grad_(True)

    def step(self, x, y):
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


if __name__ == "__main__":
    lr = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(lr)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    ft = Finetune(lr)
    for ep in range(10):
        ft.on_epoch_start(ep)
        ft.step(torch.randn(8, 3, 64, 64).cuda(), torch.randint(0, 10, (8,)).cuda())
    dist.destroy_process_group()
