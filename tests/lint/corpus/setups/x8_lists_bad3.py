import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Evaluator:
    def __init__(self, ds):
        self.loader = DataLoader(ds, 8, sampler=DistributedSampler(ds, shuffle=False))

    def run(self, net):
        hits = []
        with torch.no_grad():
            for x, y in self.loader:
                hits += (net(x).argmax(1) == y).tolist()
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, hits)
        flat = [h for part in every for h in part]
        return sum(flat) / len(flat)


dist.init_process_group("gloo")
torch.manual_seed(0)
acc = Evaluator(TensorDataset(torch.randn(77, 3), torch.randint(0, 2, (77,)))).run(torch.nn.Linear(3, 2))
if dist.get_rank() == 0:
    print("accuracy", acc)
dist.destroy_process_group()
