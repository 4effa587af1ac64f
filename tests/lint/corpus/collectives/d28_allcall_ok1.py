import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = FSDP(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
for _ in range(20):
    model(torch.randn(8, 512, device="cuda")).square().mean().backward()
    opt.step()
    opt.zero_grad()
cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
    state = model.state_dict()
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
dist.barrier()
dist.destroy_process_group()
