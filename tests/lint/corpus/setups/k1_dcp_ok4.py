import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
net(torch.ones(1, 4)).sum().backward()
dcp.save({"net": net.module.state_dict()}, checkpoint_id="/tmp/dcp_ck")
dist.destroy_process_group()
