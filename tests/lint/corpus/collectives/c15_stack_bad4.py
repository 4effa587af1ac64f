import torch
from torch import distributed as td


def finish_epoch(losses, hits):
    loss = torch.stack(losses).mean()
    acc = torch.stack(hits).float().mean()
    td.all_reduce(torch.stack([loss, acc]))
    world = td.get_world_size()
    return loss / world, acc / world


def main():
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    l, a = finish_epoch(list(torch.rand(8)), list(torch.rand(8) > 0.5))
    if td.get_rank() == 0:
        print(l.item(), a.item())
    td.destroy_process_group()


main()
