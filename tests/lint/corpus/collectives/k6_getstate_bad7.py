import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset


def export(accelerator, model, path):
    unwrapped = accelerator.unwrap_model(model)
    if not accelerator.is_main_process:
        return
    weights = accelerator.get_state_dict(model)
    torch.save({"cls": type(unwrapped).__name__, "weights": weights}, path)


def main():
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    dl = DataLoader(TensorDataset(torch.randn(128, 32), torch.randint(0, 4, (128,))), batch_size=8, shuffle=True)
    net, opt, dl = accelerator.prepare(net, opt, dl)
    for x, y in dl:
        accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
        opt.step()
        opt.zero_grad()
    export(accelerator, net, "export.pt")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
