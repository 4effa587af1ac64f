import torch
import torch.distributed as dist


class Exp:
    ckpt = "best.pth"

    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)

    def train(self):
        for _ in range(20):
            self.opt.zero_grad()
            self.net(torch.randn(2, 3)).sum().backward()
            self.opt.step()
        if self.rank == 0:
            torch.save(self.net.module.state_dict(), self.ckpt)

    def test(self):
        self.net.module.load_state_dict(torch.load(self.ckpt, map_location="cpu"))
        total = self.net.module(torch.ones(1, 3)).sum().detach()
        dist.all_reduce(total)


e = Exp()
e.train()
e.test()
dist.destroy_process_group()
