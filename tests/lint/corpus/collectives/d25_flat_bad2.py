import torch
from torch import distributed as td
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class AllReduceSGD:
    def __init__(self, net, lr):
        self.params = [p for p in net.parameters() if p.requires_grad]
        self.opt = torch.optim.SGD(self.params, lr=lr)

    def sync(self):
        grads = [p.grad for p in self.params]
        flat = _flatten_dense_tensors(grads)
        td.all_reduce(flat)
        for g, new in zip(grads, _unflatten_dense_tensors(flat, grads)):
            g.copy_(new)

    def step(self, loss):
        self.opt.zero_grad()
        loss.backward()
        self.sync()
        self.opt.step()


def main():
    td.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    trainer = AllReduceSGD(net, 0.05)
    gen = torch.Generator().manual_seed(td.get_rank())
    for _ in range(10):
        trainer.step(net(torch.randn(8, 4, generator=gen)).pow(2).mean())
    td.destroy_process_group()


if __name__ == "__main__":
    main()
