import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
peer = rank ^ 1
out = torch.full((1 << 18,), float(rank))
got = torch.empty_like(out)
if rank % 2 == 0:
    dist.send(out, dst=peer)
    dist.recv(got, src=peer)
else:
    dist.recv(got, src=peer)
    dist.send(out, dst=peer)
print(rank, got[0].item())
dist.destroy_process_group()
