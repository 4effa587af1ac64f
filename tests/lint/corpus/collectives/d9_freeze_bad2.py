import torch
import torch.nn as nn
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 2)

    def forward(self, x):
        return self.decoder(torch.relu(self.encoder(x)))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def main():
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    model = DistributedDataParallel(Segmenter())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        set_trainable(model.module.encoder, epoch > 0)
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(4, 6)).sum().backward()
            opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
