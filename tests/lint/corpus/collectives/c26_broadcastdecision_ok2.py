import os

import torch
import torch.distributed as dist


def load(cache):
    box = [os.path.exists(cache) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    if box[0]:
        print("cache hit")
        return None
    emb = torch.ones(4) if dist.get_rank() == 0 else torch.empty(4)
    dist.broadcast(emb, src=0)
    return emb


dist.init_process_group("gloo")
print(dist.get_rank(), load("/nonexistent/emb.pt"))
dist.destroy_process_group()
