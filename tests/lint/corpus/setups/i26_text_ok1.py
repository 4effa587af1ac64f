import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.rand(1)
dist.all_reduce(x)
if os.environ["RANK"] == "0":
    print(x)
if os.environ.get("LOCAL_RANK", "0") in ("", "0"):
    print("first on this host")
dist.destroy_process_group()
