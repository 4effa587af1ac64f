import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Linear(8, 8).cuda()
fully_shard(model)
opt = torch.optim.AdamW(model.parameters())
for i in range(100):
    opt.zero_grad()
    model(torch.randn(2, 8).cuda()).sum().backward()
    opt.step()
    if i % 10 == 0 and dist.get_rank() == 0:
        for n, p in model.named_parameters():
            print(n, p.full_tensor().norm().item())
dist.destroy_process_group()
