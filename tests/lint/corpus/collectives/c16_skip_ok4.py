import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    history = []
    for step in range(5):
        loss = torch.tensor([float(step + rank)])
        dist.reduce(loss, dst=0, op=dist.ReduceOp.SUM)
        if rank != 0:
            continue
        history.append(loss.item() / world)
    if history:
        print(history)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
