import os

import torch
import torch.distributed as dist
import torchmetrics
from torch.nn.parallel import DistributedDataParallel as DDP


def evaluate(model, batches, device):
    acc = torchmetrics.Accuracy(task="multiclass", num_classes=5).to(device)
    model.eval()
    with torch.no_grad():
        for x, y in batches:
            acc.update(model(x.to(device)), y.to(device))
    return acc


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    model = DDP(torch.nn.Linear(10, 5).to(device), device_ids=[local_rank])
    batches = [(torch.randn(4, 10), torch.randint(0, 5, (4,))) for _ in range(8)]
    metric = evaluate(model, batches, device)
    master = dist.get_rank() == 0
    if master:
        print(f"val acc: {metric.compute():.4f}")
    dist.destroy_process_group()


main()
