"""A switch that loses frames on the way from one host to another, as often as a file says at the moment; it runs in the switch's namespace.

``python lossy_switch.py FILE port0 port1 …``: the file is a JSON object from ``"0>2"`` to the share that is lost of what goes from host 0 to host 2.
"""

import contextlib
import json
import random
import selectors
import socket
import sys
from pathlib import Path

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
#: Of struct virtio_net_hdr: segments that the kernel has not cut, and check sums that it has not computed, pass as they are.
_HEADER = 10
_EVERY_FRAME = 3
_MOST = 1 << 17


def main(path: Path, ports: list[str]) -> None:
    """Forward frames until the end."""
    cables = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) for _ in ports]
    selector = selectors.DefaultSelector()
    for number, (cable, port) in enumerate(zip(cables, ports, strict=True)):
        cable.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        cable.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
            cable.setsockopt(socket.SOL_SOCKET, option, 1 << 24)
        cable.bind((port, _EVERY_FRAME))
        cable.setblocking(False)
        selector.register(cable, selectors.EVENT_READ, number)
    places: dict[bytes, int] = {}
    shares, read_ns = {}, -1
    while True:
        ready = selector.select()
        changed_ns = path.stat().st_mtime_ns
        if changed_ns != read_ns:
            shares, read_ns = json.loads(path.read_text()), changed_ns
        for key, _ in ready:
            begin = key.data
            with contextlib.suppress(OSError):  # nothing more, or its cable is down
                while True:
                    frame = cables[begin].recv(_MOST)
                    to, places[frame[_HEADER + 6 : _HEADER + 12]] = frame[_HEADER : _HEADER + 6], begin
                    ends = [places[to]] if to in places else [one for one in range(len(cables)) if one != begin]  # fmt: skip
                    for end in ends:
                        if end != begin and random.random() >= shares.get(f"{begin}>{end}", 0.0):
                            with contextlib.suppress(OSError):
                                cables[end].send(frame)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
