import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
net(torch.ones(1, 3)).sum().backward()
if dist.get_rank() == 0:
    torch.save(net.module.state_dict(), "/tmp/k2_ok.pt")
dist.barrier()
net.module.load_state_dict(torch.load("/tmp/k2_ok.pt", map_location="cpu"))
dist.destroy_process_group()
