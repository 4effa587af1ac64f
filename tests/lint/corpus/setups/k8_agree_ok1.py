import glob

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
choice = [None]
if dist.get_rank() == 0:
    found = sorted(glob.glob("/tmp/k8_none/step_*.pt"))
    choice = [found[-1] if found else None]
dist.broadcast_object_list(choice, src=0)
net = torch.nn.Linear(2, 2)
if choice[0] is not None:
    net.load_state_dict(torch.load(choice[0], map_location="cpu"))
net = torch.nn.parallel.DistributedDataParallel(net)
net(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
