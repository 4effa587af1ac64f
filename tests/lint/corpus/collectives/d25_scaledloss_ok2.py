import torch
import torch.distributed as dist
import torch.nn as nn


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 10)
    for _ in range(5):
        opt.zero_grad()
        loss = net(torch.randn(4, 4)).pow(2).mean() / world
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
