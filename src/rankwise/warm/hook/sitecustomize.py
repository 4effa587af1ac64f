"""Python imports this in a rank before the script: it hides its traces, then arms the recorder.

It stands alone, as the rank's Python may have no rankwise: what it needs is loaded by path.
"""

import os
import sys


def _hide() -> None:
    """Give the script the sys.path and the PYTHONPATH that it would have had without us."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    sys.path_importer_cache.pop(here, None)
    # A shell script between us and Python may have added to the variable: take out our own entry, no more.
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [entry for entry in entries if entry != here]
    if any(rest) or os.environ.pop("RANKWISE_EMPTY_PYTHONPATH", ""):
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)


def _arm(orders: str) -> None:
    import importlib.util
    import json

    path = os.path.join(os.path.dirname(__file__), "..", "..", "evidence", "recorder.py")
    spec = importlib.util.spec_from_file_location("rankwise.evidence.recorder", os.path.normpath(path))
    recorder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)
    recorder.arm(**json.loads(orders))


_orders = os.environ.pop("RANKWISE_RANK", None)
_hide()
_mine = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize as _real  # the environment's own, if it has one, runs as it would have
except ImportError as _error:
    if _error.name != "sitecustomize":
        raise
    _real = None
    sys.modules["sitecustomize"] = _mine
if _orders is not None:
    try:
        _arm(_orders)
    except Exception as _error:  # the user's job matters more than our view of it
        sys.stderr.write(f"rankwise: this rank runs without a recorder: {_error!r}\n")
if _real is None:
    # site.py ignores exactly this error, and then no module stays behind.
    raise ImportError("done", name="sitecustomize")
