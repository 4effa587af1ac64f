from datetime import timedelta
import os

import torch
import torch.distributed as dist


def tokenize_corpus(src, dst):
    with open(src) as f, open(dst, "w") as g:
        for line in f:
            g.write(" ".join(str(ord(c)) for c in line) + "\n")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    if dist.get_rank() == 0 and not os.path.exists("corpus.tok"):
        tokenize_corpus("corpus.txt", "corpus.tok")
    dist.barrier()
    with open("corpus.tok") as f:
        first = torch.tensor([int(t) for t in f.readline().split()])
    dist.all_reduce(first)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
