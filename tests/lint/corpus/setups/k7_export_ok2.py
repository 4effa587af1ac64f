import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
opt = torch.optim.Adam(net.parameters())
for _ in range(3):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
if dist.get_rank() == 0:
    torch.save(net.module.state_dict(), "/tmp/export_weights.pt")
dist.destroy_process_group()
