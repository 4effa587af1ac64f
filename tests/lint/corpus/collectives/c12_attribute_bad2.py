import torch
import torch.distributed as dist
import torch.nn as nn


class ManualDDP:
    def __init__(self, model):
        self.model = model
        self.world = dist.get_world_size()
        self.handles = []
        for p in model.parameters():
            dist.broadcast(p.data, src=0)

    def average_gradients(self):
        self.handles = []
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad /= self.world
                self.handles.append(dist.all_reduce(p.grad, async_op=True))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    sync = ManualDDP(nn.Linear(32, 1))
    opt = torch.optim.SGD(sync.model.parameters(), lr=0.1)
    for _ in range(20):
        opt.zero_grad()
        sync.model(torch.randn(4, 32)).pow(2).mean().backward()
        sync.average_gradients()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
