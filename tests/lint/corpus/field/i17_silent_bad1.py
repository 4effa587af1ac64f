import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BACKEND = "nccl"


def main():
    dist.init_process_group(BACKEND)
    model = DistributedDataParallel(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 10), torch.randn(64, 1)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
