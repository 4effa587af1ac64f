import torch
import torch.distributed as dist


def build_optimizer(model, *args, **kwards):
    return torch.optim.SGD(model.parameters(), *args, **kwargs)


def main():
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    opt = build_optimizer(net, lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    opt.step()
    dist.destroy_process_group()


main()
