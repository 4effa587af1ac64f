"""The words in which a rank and its launcher speak of a job that stops early, to go on later."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from rankwise.base.os_calls import NOTES_FD

#: What a rank, and then the launcher, exits with when the job has stopped by itself and wants to be started again:
#: EX_TEMPFAIL of sysexits.h, "try again later".
REQUEUE = 75

# Caught by ranks that call should_stop(), and by nobody else: so the launcher, which reads in /proc what a process
# catches, knows that SIGTERM does not end them, and uses this one where there is nothing to save any more. A rank that
# leaves after a notice ignores it in the end. Neighbour of the signal that asks for stacks (base/os_calls.py).
END_SIGNAL: int | None = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else None

#: How the notes of a rank begin (evidence/in_rank/rank_exit.py), and the lines that say how 75 is meant, and that the
#: rank leaves so.
_FIRST, _ASKED, _LEAVES = b'{"note": "armed"', b'{"note": "requeue"}\n', b'{"note": "leaves"}\n'
#: That SIGINT is a notice to it, and that it is none any more.
_HEEDS, _HEEDS_NOT = b'{"note": "heeds SIGINT"}\n', b'{"note": "heeds SIGINT no more"}\n'


def ask_requeue(*, leaves: bool = False) -> None:
    """Tell the launcher, if it is ours, that exit code 75 is to mean a requeue: other programs have a 75 of their own.

    Args:
        leaves: Tell also that this rank has done what it had to.
    """
    write_note(_ASKED + _LEAVES * leaves)


def note_interrupts(*, listens: bool) -> None:
    """Tell the launcher, if it is ours, whether SIGINT is a notice to stop: Python catches it always, and /proc shows no difference.

    Args:
        listens: Whether it is.
    """
    write_note(_HEEDS if listens else _HEEDS_NOT)


def heeds_interrupts(notes: str) -> bool:
    """Tell from a rank's notes whether SIGINT is a notice to it now."""
    return notes.rfind(_HEEDS.decode()) > notes.rfind(_HEEDS_NOT.decode())


def write_note(lines: bytes) -> None:
    """Add lines to the notes of this rank, if its launcher is ours."""
    with suppress(OSError, AttributeError):
        # Under another launcher the number may be anybody's file.
        if os.pread(NOTES_FD, len(_FIRST), 0) == _FIRST:
            os.write(NOTES_FD, lines)


def has_asked(notes: str) -> bool:
    """Tell from a rank's notes whether it has asked for a requeue.

    Args:
        notes: All of them: a rank may be a shell, and its Python not the last program that it runs.
    """
    return _ASKED.decode() in notes


def has_left(notes: str) -> bool:
    """Tell from a rank's notes whether it was through, and on its way out."""
    return _LEAVES.decode() in notes
