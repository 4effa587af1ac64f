import torch
import torch.distributed as dist
import wandb
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
rank = dist.get_rank()
run = wandb.init(project="profile", group="job-17", name=f"rank{rank}", mode="offline")
writer = SummaryWriter(f"/tmp/tb/rank{rank}")
x = torch.ones(1)
dist.all_reduce(x)
writer.add_scalar("sum", x.item(), 0)
run.log({"sum": x.item()})
writer.close()
run.finish()
dist.destroy_process_group()
