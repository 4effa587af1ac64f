import torch
import torch.distributed as dist


def push(t, peer):
    dist.send(t, dst=peer)


def pull(shape, peer):
    t = torch.empty(shape)
    dist.recv(t, src=peer)
    return t


def exchange_gradients(g):
    partner = dist.get_rank() ^ 1
    push(g, partner)
    other = pull(g.shape, partner)
    return (g + other) / 2


dist.init_process_group("gloo")
grads = torch.randn(2000, 1000)
print(exchange_gradients(grads).norm().item())
dist.destroy_process_group()
