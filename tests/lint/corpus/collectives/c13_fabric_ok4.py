import torch
from lightning.fabric import Fabric


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(5 + fabric.global_rank)
    net = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    model, opt = fabric.setup(net, opt)
    for step in range(4):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.backward(loss)
        opt.step()
        opt.zero_grad()
        fabric.print(f"step {step}: {mean.item():.4f}")
    fabric.barrier()


if __name__ == "__main__":
    main()
