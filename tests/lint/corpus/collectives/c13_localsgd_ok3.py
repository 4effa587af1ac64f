import torch
import torch.distributed as dist


@torch.no_grad()
def average_parameters(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(dist.get_rank())
    for step in range(40):
        opt.zero_grad()
        net(torch.randn(8, 4, generator=gen)).pow(2).mean().backward()
        opt.step()
        if step % 8 == 7:
            average_parameters(net)
    print(dist.get_rank(), net.weight.tolist())
    dist.destroy_process_group()


main()
