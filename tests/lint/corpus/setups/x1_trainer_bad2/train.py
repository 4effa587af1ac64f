import torch
import torch.distributed as dist

from data import build_loader
from engine import Engine

if __name__ == "__main__":
    dist.init_process_group("gloo")
    Engine(torch.nn.Linear(8, 1), build_loader(16)).fit(epochs=20)
    dist.destroy_process_group()
