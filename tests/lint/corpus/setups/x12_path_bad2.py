from pathlib import Path

import torch
import torch.distributed as dist


class Trainer:
    def __init__(self, root):
        self.root = Path(root)
        self.logs = self.root / "logs"
        for d in (self.root, self.logs):
            if not d.is_dir():
                d.mkdir(parents=True)
        self.net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    def run(self):
        self.net(torch.ones(1, 2)).sum().backward()
        (self.logs / f"rank{dist.get_rank()}.txt").write_text("ok")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer("exp/a").run()
    dist.destroy_process_group()
