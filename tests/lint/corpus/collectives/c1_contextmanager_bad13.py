import contextlib
import time

import torch.distributed as dist


@contextlib.contextmanager
def main_process_section(name):
    start = time.perf_counter()
    yield dist.get_rank() == 0
    dist.barrier()
    print(f"{name}: {time.perf_counter() - start:.1f}s")


def build_vocab(path):
    with open(path) as f:
        return sorted({w for line in f for w in line.split()})


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        with main_process_section("vocab"):
            vocab = build_vocab("corpus.txt")
            with open("vocab.txt", "w") as out:
                out.write("\n".join(vocab))
    print("rank", dist.get_rank(), "continues")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
