import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    with accelerator.main_process_first():
        data = TensorDataset(torch.randn(128, 8), torch.randint(0, 2, (128,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = torch.nn.Linear(8, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for epoch in range(2):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
        mean = accelerator.gather(loss.detach()).mean()
        if accelerator.is_main_process:
            print(f"epoch {epoch}: {mean.item():.4f}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        torch.save(unwrapped.state_dict(), "linear.pt")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
