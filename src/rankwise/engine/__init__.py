"""The only room that touches torch: small programs that the torch-free parent starts in the ranks' Python.

Each ``*_process.py`` runs as a process of its own, as a plain file: the ranks' Python may have no rankwise.
"""

from __future__ import annotations

from pathlib import Path

STORE_PROCESS = Path(__file__).with_name("store_process.py")
HELPER_PROCESS = Path(__file__).with_name("helper_process.py")
TORCH_FACTS_PROCESS = Path(__file__).with_name("torch_facts_process.py")
ALL_REDUCE_PROCESS = Path(__file__).with_name("all_reduce_process.py")
