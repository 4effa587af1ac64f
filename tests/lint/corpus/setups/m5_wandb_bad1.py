import torch
import torch.distributed as dist
import wandb
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
wandb.init(project="speech", name="ddp")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.Adam(net.parameters())
for step in range(100):
    loss = net(torch.randn(4, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    wandb.log({"step": step})
wandb.finish()
dist.destroy_process_group()
