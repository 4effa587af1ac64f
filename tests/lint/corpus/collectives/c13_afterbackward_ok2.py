import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def reduced(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return (value / dist.get_world_size()).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(3, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss = model(torch.randn(2, 3)).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = reduced(loss)
        if dist.get_rank() == 0:
            print(f"{mean:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
