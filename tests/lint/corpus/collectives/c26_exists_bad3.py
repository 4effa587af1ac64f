import os

import torch
from torch import distributed as td


def load_embeddings(cache="/scratch/emb.pt"):
    if os.path.exists(cache):
        return torch.load(cache, map_location="cpu", weights_only=True)
    emb = torch.randn(100, 16) if td.get_rank() == 0 else torch.empty(100, 16)
    td.broadcast(emb, src=0)
    torch.save(emb, f"{cache}.{td.get_rank()}")
    return emb


def main():
    td.init_process_group("gloo")
    print(td.get_rank(), load_embeddings().shape)
    td.destroy_process_group()


if __name__ == "__main__":
    main()
