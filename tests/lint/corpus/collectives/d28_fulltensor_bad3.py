import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def save(model, path):
    state = {}
    is_main = dist.get_rank() == 0
    for name, param in model.named_parameters():
        if is_main:
            state[name] = param.full_tensor().cpu()
    if is_main:
        torch.save(state, path)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        model(torch.randn(4, 16)).sum().backward()
        opt.step()
        opt.zero_grad()
    save(model, "fsdp2.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
