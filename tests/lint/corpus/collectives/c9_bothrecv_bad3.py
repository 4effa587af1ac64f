import torch
import torch.distributed as dist


def swap_edges(grid):
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    edge = torch.empty(grid.shape[1])
    dist.recv(edge, src=left)
    dist.send(grid[-1].contiguous(), dst=right)
    return edge


def main():
    dist.init_process_group("gloo")
    grid = torch.rand(64, 64)
    for _ in range(10):
        grid[0] = 0.5 * (grid[0] + swap_edges(grid))
    print(dist.get_rank(), float(grid.mean()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
