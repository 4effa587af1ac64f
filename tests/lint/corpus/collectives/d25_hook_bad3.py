import torch
from torch.distributed import all_reduce, destroy_process_group, get_rank, init_process_group


def sum_over_ranks(grad):
    grad = grad.clone()
    all_reduce(grad)
    return grad


def main():
    init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 2)
    for p in net.parameters():
        p.register_hook(sum_over_ranks)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(100 + get_rank())
    for _ in range(5):
        opt.zero_grad()
        net(torch.randn(3, 6)).square().mean().backward()
        opt.step()
    destroy_process_group()


main()
