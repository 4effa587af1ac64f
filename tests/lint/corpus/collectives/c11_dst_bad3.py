import torch
from torch import distributed as td


def main():
    td.init_process_group("gloo")
    world = td.get_world_size()
    workers = list(range(1, world))
    pg = td.new_group(ranks=workers)
    if td.get_rank() in workers:
        loss = torch.rand(1)
        td.reduce(loss, dst=0, op=td.ReduceOp.SUM, group=pg)
        if td.get_rank(pg) == 0:
            print("sum over workers", loss.item())
    td.barrier()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
