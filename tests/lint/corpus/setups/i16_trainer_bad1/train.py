import torch
import torch.distributed as dist

from engine import Trainer


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trainer = Trainer(torch.nn.Linear(10, 2))
    trainer.run(10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
