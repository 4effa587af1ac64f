import torch
from engine import Engine
from utils.dist import cleanup, init, is_master

if __name__ == "__main__":
    init()
    e = Engine(torch.nn.Linear(3, 1))
    for ep in range(4):
        e.train_epoch()
        if is_master():
            print(ep, e.validate())
    cleanup()
