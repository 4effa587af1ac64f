import torch
from accelerate import Accelerator
from torchvision import datasets

acc = Accelerator(cpu=True)
with acc.local_main_process_first():
    ds = datasets.FashionMNIST("/tmp/fashion", train=True, download=True)
n = acc.reduce(torch.tensor(len(ds)), reduction="sum")
acc.print(n)
acc.end_training()
