import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
net(torch.ones(1, 3)).sum().backward()
dist.barrier()
if dist.get_rank() == 0:
    torch.save(net.module.state_dict(), "stage1.pt")
state = torch.load("stage1.pt", map_location=torch.device("cpu"))
stage2 = torch.nn.Linear(3, 3)
stage2.load_state_dict(state)
stage2 = torch.nn.parallel.DistributedDataParallel(stage2)
stage2(torch.ones(1, 3)).sum().backward()
dist.destroy_process_group()
