import torch
import torch.distributed as dist


class ExpertParallel:
    def __init__(self, experts):
        self.experts = experts
        self.group = dist.new_group(experts)

    def deal(self, n):
        part = torch.empty(n)
        if dist.get_rank() not in self.experts:
            return None
        parts = None
        if dist.get_rank() == self.experts[0]:
            parts = list(torch.arange(float(n * len(self.experts))).chunk(len(self.experts)))
        dist.scatter(part, parts, src=0, group=self.group)
        return part


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ep = ExpertParallel([1, 2, 3])
    print(dist.get_rank(), ep.deal(4))
    dist.destroy_process_group()
