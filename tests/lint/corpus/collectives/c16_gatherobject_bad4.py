import torch.distributed as dist


class Vocabulary:
    def __init__(self, words):
        self.words = words

    def merge(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        found = [None for _ in range(world)]
        dist.gather_object(sorted(self.words), found if rank == 0 else None, dst=0)
        merged = set()
        for part in found:
            merged.update(part or [])
        self.words = sorted(merged)
        return len(self.words)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    v = Vocabulary({"a", f"w{dist.get_rank()}"})
    print(dist.get_rank(), "vocabulary size", v.merge())
    dist.destroy_process_group()
