import torch
import torch.distributed as dist


def sync_grads(model):
    world = dist.get_world_size()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad.data)
            p.grad.data.div_(world)


def main():
    dist.init_process_group("gloo")
    table = torch.zeros(4, 2)
    table[1] += dist.get_rank()
    dist.all_reduce(table[1])
    dist.all_reduce(table.view(-1)[:2])
    if dist.get_rank() == 0:
        print(table.tolist())
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    net(torch.ones(1, 2) * dist.get_rank()).sum().backward()
    sync_grads(net)
    print(dist.get_rank(), net.weight.grad.tolist())
    dist.destroy_process_group()


main()
