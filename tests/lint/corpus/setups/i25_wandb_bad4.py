import torch
import torch.distributed as dist
import wandb


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


def parse_config():
    return {"lr": 3e-4, "steps": 100}


cfg = parse_config()
if is_main_process():
    wandb.init(project="segmentation", config=cfg)

dist.init_process_group(backend="gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Conv2d(3, 1, 1))
opt = torch.optim.AdamW(model.parameters(), cfg["lr"])
for step in range(cfg["steps"]):
    loss = model(torch.rand(1, 3, 8, 8)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
