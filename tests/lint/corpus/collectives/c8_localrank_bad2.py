import os

import torch
import torch.distributed as dist


class State:
    def __init__(self):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.best = torch.zeros(1)

    def publish(self, value):
        self.best.fill_(value)
        dist.broadcast(self.best, self.local_rank)
        return float(self.best)


def main():
    dist.init_process_group("gloo")
    s = State()
    print(s.publish(0.5 + dist.get_rank()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
