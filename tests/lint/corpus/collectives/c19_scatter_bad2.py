import torch
from torch import distributed as td


def split_work(n):
    world = td.get_world_size()
    mine = torch.empty(n // world, dtype=torch.long)
    chunks = list(torch.arange(n).chunk(world))
    td.scatter(mine, chunks, src=0)
    return mine


def main():
    td.init_process_group("gloo")
    print(td.get_rank(), split_work(8).tolist())
    td.destroy_process_group()


if __name__ == "__main__":
    main()
