import os

import torch
import torch.distributed as dist

CKPT = "checkpoint.pth"
dist.init_process_group("gloo")
net = torch.nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
box = [torch.load(CKPT, map_location="cpu") if dist.get_rank() == 0 and os.path.exists(CKPT) else None]
dist.broadcast_object_list(box, src=0)
start = 0
if box[0]:
    net.load_state_dict(box[0]["net"])
    opt.load_state_dict(box[0]["opt"])
    start = box[0]["next"]
ddp = torch.nn.parallel.DistributedDataParallel(net)
for epoch in range(start, 50):
    opt.zero_grad()
    ddp(torch.randn(4, 3)).sum().backward()
    opt.step()
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "next": epoch + 1}, CKPT)
dist.destroy_process_group()
