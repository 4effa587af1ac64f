import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.tensor([float(rank)])
bucket = [torch.zeros(1) for _ in range(world)] if rank == 0 else None
dist.gather(x, bucket, dst=0)
mean = torch.stack(bucket).mean()
print(mean)
dist.destroy_process_group()
