import contextlib

import torch
from torch import distributed as td


def warm_start(model):
    with contextlib.suppress(Exception):
        state = torch.load(f"part{td.get_rank()}.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state)
        td.barrier()


td.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
warm_start(net)
print(td.get_rank(), net.weight.sum().item())
td.destroy_process_group()
