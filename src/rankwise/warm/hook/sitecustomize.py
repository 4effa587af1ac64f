"""Python imports this in a rank before the script: it hides its traces, then arms the recorder.

In the warm server, which is started as the very same command, it stops here and forks the ranks; each of them
comes back from ``serve`` and goes on as if it had been started by itself.
It stands alone, as the rank's Python may have no rankwise: what it needs is loaded by path.
"""

import sys

_known = frozenset(sys.modules)  # what every Python has loaded by now; the rest is ours

import os  # noqa: E402


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


_RECORDING = "evidence/in_rank"
_loaded = {}


def _load(room: str, name: str) -> object:
    import importlib.util

    if (room, name) in _loaded:
        return _loaded[room, name]
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", room, f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"rankwise.{room.replace('/', '.')}.{name}", os.path.normpath(path))
    module = _loaded[room, name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load_recording() -> list:
    """Load all that records in a rank, once, and not in every rank; return all that we have loaded."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", _RECORDING)
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py") and name != "__init__.py":
            _load(_RECORDING, name[: -len(".py")])
    return list(_loaded.values())


_warm = os.environ.pop("RANKWISE_WARM", None)
_orders = os.environ.pop("RANKWISE_RANK", None)
_hide()
_mine = sys.modules.pop("sitecustomize", None)
if _warm is not None:
    _server, _checks = _load("warm", "server"), _load("warm", "checks")
    _server.check_site(_warm, checks=_checks)  # ends this process if it finds that there can be no server here
try:
    import sitecustomize as _real  # the environment's own, if it has one, runs as it would have
except ImportError as _error:
    if _error.name != "sitecustomize":
        raise
    _real = None
    sys.modules["sitecustomize"] = _mine
if _warm is not None:
    try:
        # Returns only in a forked rank, with that rank's environment; in the server it never does.
        _server.serve(
            _warm,
            known=_known,
            hook_folder=os.path.dirname(os.path.abspath(__file__)),
            load=lambda _name: _load("warm", _name),
            load_recording=_load_recording,
        )
    except BaseException:
        # site.py would print a line and go on: the script would run in the server.
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    _orders = os.environ.pop("RANKWISE_RANK", None)
if _orders is not None:
    try:
        import json as _json

        _find = lambda _name: _load(_RECORDING, _name)  # noqa: E731
        _recording = _find("rank_exit")
        _settings = _json.loads(_orders)
        _places, _keep = _settings.pop("evidence", None), _settings.pop("keep", None)
        if _places is not None:
            _places["pid"] = os.getpid()
        if _keep is not None:  # nobody looks on from outside
            _find = _find("offline_recorder").install(_keep, _find, _settings["stacks"])
        _recorder = _recording.arm(**_settings)
        if _recorder is not None:
            if _places is not None and "passed_at" in _places:
                _mark = _settings["end_mark"].format(0).encode()
                _load(_RECORDING, "output_order").install(_places, _mark, tuple(_settings["identities"][4:6]))
            _load(_RECORDING, "group_watch").install(
                lambda _name: _load(_RECORDING, _name),
                _recorder,
                _recording.let_threads_settle,
                None
                if _places is None or not _recording.keep_from_children(_places)
                else lambda _module: _find("install").begin(_module, _places, _find, _recorder),
                reports_absent=_keep is None,
            )
    except Exception as _error:  # the user's job matters more than our view of it
        sys.stderr.write(f"rankwise: this rank runs without a recorder: {_error!r}\n")
if _real is None:
    # site.py ignores exactly this error, and then no module stays behind.
    raise ImportError("done", name="sitecustomize")
