import torch
import torchvision
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = torchvision.models.resnet18()
for p in net.parameters():
    p.requires_grad = False
net.fc = torch.nn.Linear(512, 10)
model = DDP(net)
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for ep in range(4):
    opt.zero_grad()
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    opt.step()
for p in model.parameters():
    p.requires_grad = False
dist.destroy_process_group()
