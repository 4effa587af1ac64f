import torch
from torch.distributed import broadcast, destroy_process_group, init_process_group
from torch.nn import Linear, Module


class Head(Module):
    def __init__(self):
        super().__init__()
        self.a = Linear(4, 4)
        self.b = Linear(4, 4)
        self.frozen = set()

    def freeze(self, *names):
        self.frozen.update(names)
        for n, p in self.named_parameters():
            if n in self.frozen:
                p.requires_grad_(False)


def sync_frozen(model):
    params = dict(model.named_parameters())
    for name in model.frozen:
        broadcast(params[name].data, 0)


init_process_group("gloo")
net = Head()
net.freeze("a.weight", "b.weight", "b.bias")
sync_frozen(net)
print({n: float(p.sum()) for n, p in net.named_parameters()})
destroy_process_group()
