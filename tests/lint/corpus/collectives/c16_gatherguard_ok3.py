import torch
import torch.distributed as dist


def collect(scores):
    rank, world = dist.get_rank(), dist.get_world_size()
    out = [torch.empty_like(scores) for _ in range(world)] if rank == 0 else None
    dist.gather(scores, out, dst=0)
    if rank != 0:
        return None
    return torch.cat(out)


def main():
    dist.init_process_group("gloo")
    everything = collect(torch.rand(4))
    if everything is not None:
        print("median", everything.median().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
