import signal
import subprocess
import sys


def main():
    child = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"])

    def forward(sig, frame):
        child.send_signal(sig)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    sys.exit(child.wait())


if __name__ == "__main__":
    main()
