import torch
import torch.distributed as dist


class Logger:
    def __init__(self):
        self.best = float("inf")

    def step(self, loss):
        if loss.item() < self.best:
            self.best = loss.item()
            best = torch.tensor([self.best])
            dist.all_reduce(best, op=dist.ReduceOp.MIN)
            if dist.get_rank() == 0:
                print("new best", best.item())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    log = Logger()
    for _ in range(50):
        log.step(torch.rand(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
