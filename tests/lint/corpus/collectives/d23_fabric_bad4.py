import torch
from lightning.fabric import Fabric


def train(fabric, model, opt, batches):
    for i, x in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=True):
            loss = model(x).pow(2).mean()
            fabric.backward(loss)
        if i % 2:
            opt.step()
            opt.zero_grad()


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(fabric.global_rank)
    net = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net, opt = fabric.setup(net, opt)
    train(fabric, net, opt, [torch.randn(3, 4) for _ in range(8)])


if __name__ == "__main__":
    main()
