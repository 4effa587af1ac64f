import torch
import torch.distributed as dist


def server(rounds, workers):
    w = torch.zeros(4)
    for _ in range(rounds):
        for peer in range(1, workers + 1):
            g = torch.empty(4)
            dist.recv(g, src=peer)
            w -= 0.1 * g
        for peer in range(1, workers + 1):
            dist.send(w, dst=peer)
    return w


def worker(rounds):
    w = torch.zeros(4)
    for _ in range(rounds):
        dist.send(w - 1.0, dst=0)
        dist.recv(w, src=0)
    return w


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    w = server(3, world - 1) if rank == 0 else worker(3)
    print(rank, w.tolist())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
