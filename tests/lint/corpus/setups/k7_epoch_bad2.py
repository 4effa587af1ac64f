import os
import torch
import torch.distributed as dist


class Trainer:
    def __init__(self, path):
        self.path = path
        self.net = torch.nn.Linear(3, 1)
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.epochs_run = 0
        if os.path.exists(path):
            s = torch.load(path, map_location="cpu")
            self.net.load_state_dict(s["m"])
            self.opt.load_state_dict(s["o"])
            self.epochs_run = s["epoch"]
        self.ddp = torch.nn.parallel.DistributedDataParallel(self.net)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.opt.zero_grad()
            self.ddp(torch.randn(4, 3)).mean().backward()
            self.opt.step()
            if dist.get_rank() == 0:
                torch.save({"m": self.net.state_dict(), "o": self.opt.state_dict(), "epoch": epoch}, self.path + ".tmp")
                os.replace(self.path + ".tmp", self.path)


dist.init_process_group("gloo")
Trainer("t.pt").train(10)
dist.destroy_process_group()
