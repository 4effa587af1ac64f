import torch
import torch.distributed as dist

from saver import Saver

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
opt = torch.optim.Adam(net.parameters())
saver = Saver("ckpts")
for step in range(30):
    opt.zero_grad()
    net(torch.randn(2, 4)).sum().backward()
    opt.step()
    if step % 10 == 9:
        saver.dump(net, opt, step)
dist.destroy_process_group()
