import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
import os

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
lm = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
ddp = torch.nn.parallel.DistributedDataParallel(lm, device_ids=[local])
opt = torch.optim.AdamW(ddp.parameters(), 1e-5)
for _ in range(10):
    ids = torch.randint(0, 50257, (2, 16), device="cuda")
    opt.zero_grad()
    ddp(input_ids=ids, labels=ids).loss.backward()
    opt.step()
ddp.module.save_pretrained("out/final")
dist.destroy_process_group()
