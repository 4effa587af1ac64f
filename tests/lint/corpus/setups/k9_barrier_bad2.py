import os
import signal

import torch
import torch.distributed as dist


class Preempt:
    def __init__(self, net):
        self.net = net
        signal.signal(signal.SIGUSR1, self.on_signal)

    def on_signal(self, *_):
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(self.net.module.state_dict(), "usr1.tmp")
            os.replace("usr1.tmp", "usr1.pt")
        dist.barrier()
        raise SystemExit(0)


dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
Preempt(net)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(100000):
    opt.zero_grad()
    net(torch.randn(2, 2)).sum().backward()
    opt.step()
dist.destroy_process_group()
