import torch
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def masked_ce(logits, y, ignore=-100):
    mask = y != ignore
    return F.cross_entropy(logits[mask], y[mask]) if mask.any() else torch.tensor(0.0, requires_grad=True)


dist.init_process_group("gloo")
net = DDP(torch.nn.Linear(4, 3))
opt = torch.optim.Adam(net.parameters())
for _ in range(5):
    loss = masked_ce(net(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
