"""What pip installs as `torchrun`, to be forked."""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
