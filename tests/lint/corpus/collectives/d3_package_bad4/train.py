import torch
import torch.distributed as dist
from criterion import MatchLoss
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(8, 2))
    criterion = MatchLoss(radius=0.3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        points = model(torch.randn(3, 8))
        loss = criterion(points, torch.randn(2, 2))
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
