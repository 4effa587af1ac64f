import torch
from lightning.fabric import Fabric


def validate(fabric, model, batches):
    model.eval()
    total = torch.zeros((), device=fabric.device)
    with torch.no_grad():
        for x in batches:
            total += model(x.to(fabric.device)).abs().mean()
    return total / len(batches)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1 + fabric.global_rank)
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt = fabric.setup(model, opt)

    for epoch in range(2):
        for _ in range(5):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            fabric.backward(loss)
            opt.step()
            opt.zero_grad()
        score = validate(fabric, model, [torch.randn(8, 4) for _ in range(3)])
        if fabric.is_global_zero:
            score = fabric.all_reduce(score, reduce_op="mean")
            print("epoch", epoch, "score", float(score))


if __name__ == "__main__":
    main()
