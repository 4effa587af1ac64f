import torch
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16))

    def forward(self, x):
        return x - self.body(x)


class Loop:
    def __init__(self):
        self.is_main = td.get_rank() == 0
        self.net = DistributedDataParallel(Denoiser())
        self.opt = torch.optim.Adam(self.net.parameters())

    def preview(self, noise):
        return self.net(noise).std().item()

    def run(self, steps):
        for step in range(steps):
            clean = torch.randn(4, 16)
            loss = (self.net(clean + torch.randn_like(clean)) - clean).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if self.is_main:
                print(step, self.preview(torch.randn(2, 16)))
            td.barrier()


if __name__ == "__main__":
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    Loop().run(6)
    td.destroy_process_group()
