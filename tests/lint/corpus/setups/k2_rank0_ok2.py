import torch
import torch.distributed as dist

dist.init_process_group("gloo")
state = torch.zeros(5)
if dist.get_rank() == 0:
    torch.save(torch.arange(5.0), "/tmp/k2_vec.pt")
    state = torch.load("/tmp/k2_vec.pt", map_location="cpu")
dist.broadcast(state, src=0)
again = torch.load("/tmp/k2_vec.pt", map_location="cpu")
assert torch.equal(again, state)
dist.destroy_process_group()
