import torch
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


class DetectionLoss(torch.nn.Module):
    def forward(self, boxes, targets):
        if len(targets) == 0:
            return boxes.new_zeros((), requires_grad=True)
        return torch.nn.functional.smooth_l1_loss(boxes[: len(targets)], targets)


class Trainer:
    def __init__(self):
        self.net = DistributedDataParallel(torch.nn.Linear(8, 4))
        self.criterion = DetectionLoss()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self, feats, targets):
        loss = self.criterion(self.net(feats), targets)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


if __name__ == "__main__":
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    t = Trainer()
    for _ in range(50):
        n = int(torch.randint(0, 3, (1,)))
        t.step(torch.randn(5, 8), torch.randn(n, 4))
    td.destroy_process_group()
