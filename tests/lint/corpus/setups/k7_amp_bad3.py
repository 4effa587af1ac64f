import os

import torch
import torch.distributed as dist

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16).cuda(), device_ids=[local])
opt = torch.optim.Adam(net.parameters())
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=1000)
scaler = torch.amp.GradScaler("cuda")
step0 = 0
if os.environ.get("RESUME"):
    ck = torch.load(os.environ["RESUME"], map_location="cpu")
    net.module.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    step0 = ck["step"] + 1
for step in range(step0, 1000):
    with torch.autocast("cuda", torch.float16):
        loss = net(torch.randn(8, 16, device="cuda")).pow(2).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    sched.step()
    if step % 100 == 0 and dist.get_rank() == 0:
        torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "step": step}, f"s{step}.pt")
dist.destroy_process_group()
