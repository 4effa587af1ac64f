import torch
import torch.distributed as dist


def masked_loss(pred, target, mask):
    err = (pred - target).pow(2) * mask
    return err.sum() / mask.sum()


class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        self.net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        self.opt = torch.optim.Adam(self.net.parameters())

    def step(self):
        x = torch.randn(16, 8)
        mask = (torch.rand(16, 8) > torch.rand(1)).float()
        loss = masked_loss(self.net(x), x, mask)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


t = Trainer()
for _ in range(10):
    t.step()
dist.destroy_process_group()
