import argparse
import datetime as dt

import torch
import torch.distributed as dist

p = argparse.ArgumentParser()
p.add_argument("--timeout", type=float, default=20, help="minutes")
timeout = dt.timedelta(minutes=p.parse_args().timeout)
dist.init_process_group("gloo", timeout=timeout)
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
