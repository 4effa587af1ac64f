import os

import torch as th


class Saver:
    def __init__(self, root):
        self.root = root
        os.makedirs(root, exist_ok=True)

    def dump(self, net, opt, step):
        path = os.path.join(self.root, f"step{step:06d}.pt")
        th.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "step": step}, path)
