"""Public tools for tests: run a function on several ranks."""

from __future__ import annotations

from rankwise.testing.ranks import RankOutcome, run_ranks, try_ranks

__all__ = ["RankOutcome", "run_ranks", "try_ranks"]
