import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tokens = torch.tensor(100.0 + dist.get_rank())
dist.all_reduce(tokens)
if dist.get_rank() == 0:
    print("tokens in this step", int(tokens.item()))
dist.destroy_process_group()
