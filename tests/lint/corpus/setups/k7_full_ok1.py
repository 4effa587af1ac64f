import os

import torch
import torch.distributed as dist

PATH = "/tmp/k7_full.pt"
dist.init_process_group("gloo")
net = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
sched = torch.optim.lr_scheduler.StepLR(opt, 2)
box = [torch.load(PATH, map_location="cpu") if dist.get_rank() == 0 and os.path.exists(PATH) else None]
dist.broadcast_object_list(box, src=0)
start = 0
if box[0] is not None:
    net.load_state_dict(box[0]["net"])
    opt.load_state_dict(box[0]["opt"])
    sched.load_state_dict(box[0]["sched"])
    start = box[0]["next_epoch"]
ddp = torch.nn.parallel.DistributedDataParallel(net)
for epoch in range(start, 3):
    opt.zero_grad()
    ddp(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    sched.step()
    if dist.get_rank() == 0:
        parts = {"net": net, "opt": opt, "sched": sched}
        torch.save({k: v.state_dict() for k, v in parts.items()} | {"next_epoch": epoch + 1}, PATH + ".tmp")
        os.replace(PATH + ".tmp", PATH)
dist.destroy_process_group()
