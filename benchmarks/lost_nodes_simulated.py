"""How the detection of lost nodes grows with their number: the launchers' own detectors, thousands in one process, on a simulated clock and network.

For each number of nodes, on a network that loses one packet in a hundred and with one node in a hundred that often pauses: what a node sends
while all is well, then, from the fault until all others know: seconds, and for each node messages and bytes. A launcher is killed, a host switched off, the root of the
tree frozen, and a part of the tree cut off, whose nodes have to learn of the others' loss as well. There is no peer to compare with: torchrun's nodes do not hear each other.

Run it with the tests' requirements: `python benchmarks/lost_nodes_simulated.py [NODES ...]`; 10,000 nodes take two minutes of CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rankwise.engine.node_detector import list_neighbours
from unit.simulated_nodes import Network

#: A beat is a byte, in a packet of TCP over IPv4.
PACKET_BYTES = 53
#: In the first seconds of an attempt a silence may last longer.
SETTLE_S, WELL_S, BOUND_S = 15.5, 2.0, 5.0


def measure(number: int, fault: str, victim: int) -> str:
    """Return a line of the table."""
    network = Network(number, loss=0.01, slow=dict.fromkeys(range(5, number, 100), 0.5))
    network.run(SETTLE_S)
    beats, at_s = network.num_beats, network.now_s
    network.run(WELL_S)
    beats_a_second = (network.num_beats - beats) / WELL_S / number
    wrong = sum(len(node.detector.losses) for node in network.nodes)
    messages, size_bytes, at_s = network.num_messages, network.num_bytes, network.now_s
    part = find_part(victim, number) if fault == "cut" else set()
    if fault == "cut":
        network.cut(part)
    else:
        getattr(network, fault)(victim)
    network.run(BOUND_S)
    # Who was cut off has lost the one above the cut.
    above, _ = list_neighbours(victim, number)
    heard = [node.heard_s.get(victim if node.number not in part else above or 0) for node in network.nodes]
    known = [moment - at_s for moment in heard if moment is not None]
    each, each_bytes = ((now - before) / number for now, before in ((network.num_messages, messages), (network.num_bytes, size_bytes)))  # fmt: skip
    share = PACKET_BYTES * beats_a_second / 1024
    return (
        f"{number:7}  {fault + ' ' + str(victim):12}  {beats_a_second:7.1f}  {share:6.2f}  {len(known):6}  {min(known):6.2f}  "
        f"{max(known):6.2f}  {each:9.2f}  {each_bytes:6.0f}  {wrong:6}"
    )


def find_part(place: int, number: int) -> set[int]:
    """Return a place of the tree and all below it."""
    return {place}.union(*(find_part(child, number) for child in list_neighbours(place, number)[1]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("nodes", nargs="*", type=int, default=[10, 100, 1000, 10_000])
    args = parser.parse_args()
    print("  nodes  fault         beats/s   KiB/s    know   first     all   messages   bytes   false")
    print("                      each     each             s       s       each    each  alarms")
    for number in args.nodes:
        for fault, victim in (("kill", 1), ("lose", 1), ("freeze", 0), ("cut", 1)):
            print(measure(number, fault, victim), flush=True)


if __name__ == "__main__":
    main()
