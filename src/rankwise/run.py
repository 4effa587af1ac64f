"""`python -m rankwise.run …`: the same as `rankwise run`, as `python -m torch.distributed.run` is torchrun."""

from rankwise.cli.main import entry

if __name__ == "__main__":
    entry("run")
