import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    n = 10 + dist.get_rank()
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, n)
    if dist.get_rank() == 0:
        print("samples", sum(counts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
