import torch
from torch import distributed as td


class ShardedEval:
    def __init__(self, files):
        self.files = files[td.get_rank() :: td.get_world_size()]

    def run(self, model):
        if not self.files:
            print("no shard for rank", td.get_rank())
            return None
        hits = torch.zeros(2)
        for f in self.files:
            hits += torch.tensor([model(len(f)), 1.0])
        td.all_reduce(hits)
        return (hits[0] / hits[1]).item()


if __name__ == "__main__":
    td.init_process_group("gloo")
    ev = ShardedEval(["shard-00.jsonl"])
    print(ev.run(lambda n: float(n % 2)))
    td.destroy_process_group()
