import torch
from lightning.fabric import Fabric


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(3 + fabric.global_rank)
    net = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    model, opt = fabric.setup(net, opt)
    for step in range(10):
        fabric.backward(model(torch.randn(2, 4)).sum())
        opt.step()
        opt.zero_grad()
    if fabric.global_rank == 0:
        fabric.save("fabric.ckpt", {"model": model, "opt": opt, "step": step})
    fabric.barrier()


if __name__ == "__main__":
    main()
