"""Which pairs of hosts are measured at the same time: no host is in two measurements at once."""

from __future__ import annotations


def plan_rounds(count: int, *, most: int | None = None) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs (circle method), so that each pair meets once and no host is in two pairs of one round.

    Args:
        count: How many hosts there are; they are numbers from 0.
        most: So many rounds at most: each host then has so many partners, near ones and far ones.

    Returns:
        The rounds: with ``count`` even ``count - 1``, else ``count``, of which each leaves one host out.
    """
    seats = count + count % 2
    rounds = []
    for turn in range(seats - 1):
        pairs = [(seats - 1, turn)]
        pairs += [((turn + step) % (seats - 1), (turn - step) % (seats - 1)) for step in range(1, seats // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
    if most is None or len(rounds) <= most:
        return rounds
    return [rounds[index * len(rounds) // most] for index in range(max(1, most))]
