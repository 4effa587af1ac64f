import torch
import torch.distributed as dist
import wandb
from tqdm import tqdm

dist.init_process_group("gloo")
main = dist.get_rank() == 0
wandb.init(project="speech", mode="online" if main else "disabled")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in tqdm(range(5), disable=not main):
    opt.zero_grad()
    net(torch.randn(2, 4)).sum().backward()
    opt.step()
    wandb.log({"step": step})
wandb.finish()
dist.destroy_process_group()
