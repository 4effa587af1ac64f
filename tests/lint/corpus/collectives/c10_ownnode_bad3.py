import os

import torch
from torch import distributed as td


class Topology:
    def __init__(self):
        self.rank = td.get_rank()
        self.local_world = int(os.environ["LOCAL_WORLD_SIZE"])
        self.node = self.rank // self.local_world
        first = self.node * self.local_world
        self.node_group = td.new_group(range(first, first + self.local_world))

    def node_mean(self, t):
        td.all_reduce(t, group=self.node_group)
        return t / self.local_world


def main():
    td.init_process_group("gloo")
    topo = Topology()
    print(topo.rank, topo.node_mean(torch.ones(1) * topo.rank).item())
    td.destroy_process_group()


if __name__ == "__main__":
    main()
