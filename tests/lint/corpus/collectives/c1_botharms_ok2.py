import torch
import torch.distributed as dist


def deal(n):
    rank, world = dist.get_rank(), dist.get_world_size()
    share = torch.empty(n)
    if rank == 0:
        deck = torch.randperm(n * world).float()
        dist.scatter(share, scatter_list=list(deck.chunk(world)), src=0)
    else:
        dist.scatter(share, src=0)
    return share


def main():
    dist.init_process_group("gloo")
    cards = deal(5)
    print(f"rank {dist.get_rank()} holds {cards.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
