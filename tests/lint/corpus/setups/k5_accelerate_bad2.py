import torch
from accelerate import Accelerator


def main():
    accelerator = Accelerator()
    net = torch.nn.Linear(4, 4)
    opt = torch.optim.AdamW(net.parameters())
    net, opt = accelerator.prepare(net, opt)
    for _ in range(10):
        accelerator.backward(net(torch.randn(2, 4, device=accelerator.device)).sum())
        opt.step()
        opt.zero_grad()
    accelerator.wait_for_everyone()
    if accelerator.is_local_main_process:
        torch.save(accelerator.unwrap_model(net).state_dict(), "model.bin")
    accelerator.end_training()


main()
