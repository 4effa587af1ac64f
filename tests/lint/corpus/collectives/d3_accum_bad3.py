import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = DDP(torch.nn.Linear(3, 1))
optim = torch.optim.SGD(net.parameters(), lr=0.1)

for step in range(40):
    samples = torch.randn(2, 3)
    out = net(samples)
    loss = torch.zeros(1, requires_grad=True)
    for o, s in zip(out, samples):
        if s[0] > 0:
            loss = loss + o.pow(2)
    optim.zero_grad()
    loss.backward()
    optim.step()

dist.destroy_process_group()
