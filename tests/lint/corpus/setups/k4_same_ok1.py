import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
ddp(torch.ones(1, 4)).sum().backward()
if dist.get_rank() == 0:
    torch.save(ddp.state_dict(), "/tmp/k4.pt")
dist.barrier()
ddp.load_state_dict(torch.load("/tmp/k4.pt", map_location="cpu"))
dist.destroy_process_group()
