import torch
from lightning.fabric import Fabric


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7 + fabric.global_rank)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    net[0].requires_grad_(False)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    model, opt = fabric.setup(net, opt)
    for epoch in range(4):
        if epoch == 1:
            for p in model.module[0].parameters():
                p.requires_grad = True
        for _ in range(3):
            loss = model(torch.randn(4, 8)).pow(2).mean()
            fabric.backward(loss)
            opt.step()
            opt.zero_grad()


if __name__ == "__main__":
    main()
