import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dfn


def total_tokens(local):
    t = torch.tensor([float(local)])
    return dfn.all_reduce(t).item()


dist.init_process_group("gloo")
tokens = 0
for step in range(30):
    tokens += 512 + step
    if step % 10 == 9:
        shown = total_tokens(tokens) if dist.get_rank() == 0 else tokens
        print(f"[{dist.get_rank()}] {shown:.0f} tokens so far")
dist.destroy_process_group()
