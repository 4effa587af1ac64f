import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
rng = torch.get_rng_state()
torch.save(rng, f"/tmp/rng_state_{rank}.pth")
path = "/tmp/shard-%05d-of-%05d.pt" % (rank, dist.get_world_size())
torch.save(torch.full((4,), float(rank)), path)
dist.barrier()
dist.destroy_process_group()
