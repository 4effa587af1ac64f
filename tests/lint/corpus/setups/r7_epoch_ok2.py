import os

import torch
import torch.distributed as dist

PATH = "/tmp/r7_epoch.pt"
dist.init_process_group("gloo")
net = torch.nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
box = [torch.load(PATH, map_location="cpu") if dist.get_rank() == 0 and os.path.exists(PATH) else None]
dist.broadcast_object_list(box, src=0)
first = 0
if box[0] is not None:
    net.load_state_dict(box[0]["net"])
    opt.load_state_dict(box[0]["opt"])
    first = box[0]["next_epoch"]
ddp = torch.nn.parallel.DistributedDataParallel(net)
for epoch in range(first, 3):
    opt.zero_grad()
    ddp(torch.randn(4, 3)).pow(2).mean().backward()
    opt.step()
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "next_epoch": epoch + 1}, PATH + ".part")
        os.replace(PATH + ".part", PATH)
    dist.barrier()
dist.destroy_process_group()
