import torch
import torch.distributed as dist


def evaluate(files):
    if not files:
        print("nothing to evaluate")
        return None
    mine = files[dist.get_rank() :: dist.get_world_size()]
    n = torch.tensor([float(len(mine))])
    dist.all_reduce(n)
    return n.item()


def main():
    dist.init_process_group("gloo")
    print(evaluate([]), evaluate(["a", "b", "c"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
