import torch
import torch.distributed as dist


class Cfg:
    def __init__(self, hidden):
        self.shape = (hidden,)
        self.betas = 0.9, 0.95
        self.sizes = hidden, hidden


dist.init_process_group("gloo")
cfg = Cfg(4)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(*cfg.sizes))
opt = torch.optim.Adam(net.parameters(), betas=cfg.betas)
net(torch.zeros(2, *cfg.shape)).sum().backward()
opt.step()
(total,) = [p.grad.sum() for p in net.parameters()][:1]
dist.destroy_process_group()
