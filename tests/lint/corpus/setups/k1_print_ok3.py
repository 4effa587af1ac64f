import torch
from accelerate import Accelerator
import torch.distributed as dist


def save_on_master(obj, path):
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    torch.save(obj, path)


acc = Accelerator(cpu=True)
net = acc.prepare(torch.nn.Linear(2, 2))
net(torch.ones(1, 2)).sum().backward()
acc.wait_for_everyone()
save_on_master(acc.unwrap_model(net).state_dict(), "/tmp/a.pt")
acc.save(acc.unwrap_model(net).state_dict(), "/tmp/b.pt")
acc.end_training()
