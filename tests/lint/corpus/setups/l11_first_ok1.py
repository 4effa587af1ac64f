import os

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
x = torch.ones(1).cuda()
dist.all_reduce(x)
dist.destroy_process_group()
