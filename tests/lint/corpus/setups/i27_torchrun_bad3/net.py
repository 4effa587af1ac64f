import os
import socket

import torch.distributed as dist


def _port():
    sock = socket.socket()
    sock.bind(("localhost", 0))
    port = sock.getsockname()[1]
    sock.close()
    return port


def init():
    os.environ["MASTER_PORT"] = f"{_port()}"
    dist.init_process_group("gloo")
