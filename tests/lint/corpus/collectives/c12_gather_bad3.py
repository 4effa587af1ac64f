import torch
from torch.distributed import all_gather, destroy_process_group, get_rank, get_world_size, init_process_group


def gather_embeddings(z):
    out = [torch.empty_like(z) for _ in range(get_world_size())]
    work = all_gather(out, z, async_op=True)
    full = torch.cat(out)
    work.wait()
    return full


def main():
    init_process_group("gloo")
    torch.manual_seed(get_rank())
    with torch.no_grad():
        emb = gather_embeddings(torch.randn(16, 8))
    if get_rank() == 0:
        print(emb.shape, emb.norm().item())
    destroy_process_group()


if __name__ == "__main__":
    main()
