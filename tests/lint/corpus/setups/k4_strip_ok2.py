import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
ddp(torch.ones(1, 4)).sum().backward()
if dist.get_rank() == 0:
    torch.save(ddp.state_dict(), "/tmp/k4s.pt")
dist.barrier()
state = {k.removeprefix("module."): v for k, v in torch.load("/tmp/k4s.pt", map_location="cpu").items()}
net = torch.nn.Linear(4, 2)
net.load_state_dict(state)
dist.destroy_process_group()
