import torch
import torch.distributed as dist

FILE = "/tmp/weights.pt"


def save(model):
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), FILE)


def load(model):
    model.load_state_dict(torch.load(FILE, map_location="cpu"))
