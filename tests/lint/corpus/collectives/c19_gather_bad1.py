import torch
import torch.distributed as dist

dist.init_process_group("gloo")
pred = torch.rand(4)
outs = [torch.zeros(4) for _ in range(dist.get_world_size())]
dist.gather(pred, gather_list=outs, dst=0)
if dist.get_rank() == 0:
    print(torch.cat(outs).shape)
dist.destroy_process_group()
