import torch
from torch import distributed as td
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self):
        self.rank = td.get_rank()
        self.net = DistributedDataParallel(torch.nn.Linear(16, 16))
        self.opt = ZeroRedundancyOptimizer(self.net.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)

    def step(self):
        self.opt.zero_grad()
        self.net(torch.randn(4, 16)).pow(2).mean().backward()
        self.opt.step()

    def save(self, path):
        if self.rank == 0:
            self.opt.consolidate_state_dict(to=0)
            torch.save({"net": self.net.module.state_dict(), "opt": self.opt.state_dict()}, path)


if __name__ == "__main__":
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    t = Trainer()
    for _ in range(5):
        t.step()
    t.save("zero.pt")
    td.barrier()
    td.destroy_process_group()
