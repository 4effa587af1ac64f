"""What came of a function that was launched: its values, or the first cause as one exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.errors import LaunchError, RankFailedError, RankwiseError
from rankwise.base.rank_names import name_ranks
from rankwise.launcher.function_payload import read_error, read_value

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.launcher.pool_protocol import Answer
    from rankwise.verdict.case import Verdict


def read_values(answer: Answer, folder: Path, name: str, *, timeout_s: float | None) -> list[object]:
    """Return what each rank returned.

    Args:
        answer: How the job ended.
        folder: Where the ranks have left what came of it.
        name: The function's, for errors.
        timeout_s: The limit, if the job was stopped for it; without a verdict it had not begun.

    Raises:
        RankFailedError: A rank failed, or did not end in time.
        LaunchError: No rank is to blame.
    """
    verdict = answer.verdict
    if verdict is None and timeout_s is not None:
        raise _make_not_started(name, timeout_s)
    if verdict is None:
        raise LaunchError("the launcher's own processes were killed", hint="launch again")
    paths = [folder / f"value.{rank}.{answer.restarts}" for rank in range(answer.num_ranks)]
    # Collectives that were paired wrongly have been told; what the function returned is there all the same.
    has_returned = verdict.kind == "mismatch" and all(code == 0 for code in verdict.exits.values())
    if verdict.kind == "ok" or has_returned:
        if silent := [rank for rank, path in enumerate(paths) if not path.exists()]:
            raise RankFailedError(
                f"{name_ranks(silent)} exited with code 0 before {name} returned",
                rank=silent[0],
                hint="look for os._exit(0), or an os.exec… of another program: neither lets a function return",
            )
        return [read_value(path, rank=rank, name=name) for rank, path in enumerate(paths)]
    if timeout_s is not None and not verdict.culprits:
        has_begun = any(folder.glob("begun.*"))
        raise _to_timeout(verdict, paths, name, timeout_s, has_begun=has_begun)
    raise _to_failure(answer, verdict, folder, name)


def _make_not_started(name: str, timeout_s: float) -> RankFailedError:
    return RankFailedError(
        f"no rank had started to call {name} after {timeout_s:g} s",
        hint="give it a longer timeout_s: the first call also starts the ranks' Python and imports torch",
    )


def _to_timeout(
    verdict: Verdict, paths: list[Path], name: str, timeout_s: float, *, has_begun: bool
) -> RankFailedError:
    if not has_begun:
        return _make_not_started(name, timeout_s)
    running = [rank for rank, path in enumerate(paths) if not path.exists()]
    message = f"{name} returned on all ranks, later than after {timeout_s:g} s"
    if running:
        message = f"{name_ranks(running)} of {len(paths)} had not returned from {name} after {timeout_s:g} s"
    rows = []
    for one in verdict.waiting:
        doing = f"in {one.op} " if one.op else ""
        rows.append(f"  rank {one.rank} was {doing}at {one.where}")
    return RankFailedError(
        "\n".join([message, *rows]), rank=running[0] if running else None,
        hint="give it a longer timeout_s, or look at the lines above: the job was stopped there",
    )  # fmt: skip


def _to_failure(answer: Answer, verdict: Verdict, folder: Path, name: str) -> RankwiseError:
    culprits, found = verdict.culprits, answer.reported
    if not culprits:
        return LaunchError("\n".join(filter(None, [f"{name}: {verdict.message}", found])), hint=verdict.fix or None)
    errors = {rank: read_error(folder / f"error.{rank}.{answer.restarts}") for rank in culprits}
    first = culprits[0] if verdict.first is None else verdict.first
    cause, text = errors.get(first, (None, ""))
    message = verdict.message.removeprefix(f"rank {first}: ")
    text = (text or verdict.traceback).rstrip()
    trace = f"\n\nTraceback on rank {first} of {answer.num_ranks}, in {name}:\n{text}\n" if text else ""
    error = RankFailedError(message + trace + (f"\n{found}" if found else ""), rank=first, hint=verdict.fix or None)
    error.__cause__ = cause
    return error
