import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
weights = torch.zeros(4)

if rank == 0:
    weights += torch.arange(4.0)
    for peer in range(1, world):
        dist.send(weights, dst=peer)
else:
    dist.recv(weights, src=0)

print(f"[{rank}] {weights.tolist()}")
dist.destroy_process_group()
