import json

import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.Linear(3, 1)
feats = net(torch.randn(50, 3)).detach().numpy()
np.save("feats.npy", feats)
with open("summary.json", "w") as f:
    json.dump({"mean": float(feats.mean())}, f)
dist.barrier()
dist.destroy_process_group()
