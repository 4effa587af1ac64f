"""`python -m rankwise …`: the same as the command `rankwise`."""

from rankwise.cli.main import entry

if __name__ == "__main__":
    entry()
