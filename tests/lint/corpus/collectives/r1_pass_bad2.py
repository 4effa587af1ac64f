import torch
import torch.distributed as dist


class Stats:
    def collect(self, path):
        try:
            with open(path) as f:
                n = torch.tensor([float(len(f.readlines()))])
            dist.all_reduce(n)
            return n.item()
        except Exception:
            return 0.0


def main():
    dist.init_process_group("gloo")
    s = Stats()
    print(s.collect(f"/data/part-{dist.get_rank()}.txt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
