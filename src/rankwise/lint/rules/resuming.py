"""A run that resumes does not go on where it stopped."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.rule import rule
from rankwise.lint.topics.job_view import above, is_distributed, kind_of, once, places_of, text_of
from rankwise.lint.topics.saved_files import is_model_file, reads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Entry, Script

_COUNTERS = frozenset({"epoch", "step", "iter", "iteration", "global_step", "epochs_run", "EPOCHS_RUN", "start_epoch", "epoch_idx", "EPOCH"})  # fmt: skip
_WORDS = {"optimizer": "optimizer", "scheduler": "learning-rate scheduler", "scaler": "gradient scaler"}


@rule("RW608", "warning", "K7", "a resumed run does not restore all the state of the stopped one")
def incomplete_resume(script: Script) -> Iterator[Found]:
    if ".load(" not in script.piece.code:
        return
    for entry in script.entries:
        if is_distributed(entry):
            yield from _left_out(script, entry)
    yield from _done_again(script)


def _left_out(script: Script, entry: Entry) -> Iterator[Found]:
    calls = [place.calls[0] for place in once(places_of(entry, module=script.module))]
    load = next((call for call in calls if call.name == "torch.load" and "resume" not in _taken(call)), None)
    if (
        load is None
        or not _counters_read(script)
        or not any(call.name.endswith(".load_state_dict") for call in calls)
    ):
        return
    made = {part: call for call in calls if (part := _part(call.name)) and _has_state(call)}
    given = {
        _part(kind_of(call.receiver)) or _by_name(call)
        for call in calls
        if call.name.endswith(".load_state_dict")
    }
    stepped = any(call.name.endswith((".step", ".backward")) and call.loops for call in calls)
    missing = [part for part in _WORDS if part in made and part not in given]
    if missing and stepped and None not in given:
        names = " and ".join(_WORDS[part] for part in missing)
        message = f"the run resumes from here, but the state of the {names} is not loaded: it starts over"
        fix = f"save and load {' and '.join(part + '.state_dict()' for part in missing)} too"
        yield Found(load.node, message, fix)


def _taken(call: Call) -> str:
    return ast.unparse(call.node) if call.guards else ""


def _part(kind: str) -> str | None:
    if kind.startswith(("torch.optim.lr_scheduler.", "transformers.get_")):
        return None if kind.count(".") > 3 else "scheduler"
    if kind.startswith("torch.optim."):
        return None if kind.count(".") > 2 else "optimizer"
    return "scaler" if kind in {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler"} else None


def _has_state(call: Call) -> bool:
    """Plain SGD has nothing to lose."""
    momentum = call.arg(2, "momentum")
    return call.name != "torch.optim.SGD" or (momentum is not None and momentum.const != 0)


def _by_name(call: Call) -> str | None:
    """What an unknown object is, by its name; ``model`` for known ones; None if anything is possible."""
    name = call.receiver.path.lower()
    for word, part in (("opt", "optimizer"), ("sched", "scheduler"), ("scal", "scaler")):
        if word in name:
            return part
    return "model"


def _counters_read(script: Script) -> bool:
    """Whether an epoch or step is read from what was loaded."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value in _COUNTERS
        and isinstance(node.ctx, ast.Load)
        for node in ast.walk(script.tree)
    )


def _done_again(script: Script) -> Iterator[Found]:
    """``"epoch": epoch`` saved in the loop over epochs, and the loop started at that number."""
    saved = _saved_counters(script)
    if not saved:
        return
    for node in ast.walk(script.tree):
        if not (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Subscript)
            and isinstance(node.value.slice, ast.Constant)
        ):
            continue
        key = node.value.slice.value
        if key in saved and _starts_range(script, node.targets[0]):
            name = ast.unparse(node.targets[0])
            message = f"{key!r} was saved after the epoch of that number was complete: `{name}` repeats it"
            yield Found(node.value, message, f"{name} = {ast.unparse(node.value)} + 1")


def _saved_counters(script: Script) -> set[str]:
    found, next_ones = set(), set()
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.BinOp):
                    next_ones.add(str(key.value))  # `"epoch": epoch + 1`: what counts otherwise is a log
                elif (
                    isinstance(key, ast.Constant)
                    and isinstance(value, ast.Name)
                    and _is_loop_variable(script, node, value.id)
                ):
                    found.add(str(key.value))
    return found - next_ones


def _is_loop_variable(script: Script, node: ast.AST, name: str) -> bool:
    """Whether the loop around it counts by that name, and saves at the end of each iteration."""
    for one in above(script.tree, node):
        if isinstance(one, ast.For) and isinstance(one.target, ast.Name) and one.target.id == name:
            return one.body[0].lineno < getattr(node, "lineno", 0)
    return False


def _starts_range(script: Script, target: ast.expr) -> bool:
    name = ast.unparse(target)
    return any(
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "range"
        and len(node.args) > 1
        and ast.unparse(node.args[0]) == name
        for node in ast.walk(script.tree)
    )


_OWN = frozenset({"exists", "files"})


@rule("RW609", "warning", "K8", "each rank decides for itself whether to resume")
def resume_decided_by_each_rank(script: Script) -> Iterator[Found]:
    for use in reads(script):
        call = use.call
        if call.name != "torch.load" or not is_distributed(use.place.entry) or len(use.place.ranks) == 1:
            continue
        if not is_model_file(script, use):
            continue
        test = next(
            (
                node
                for node, value, _ in call.tests
                if value.spread and value.origin & _OWN and not _is_asked_for(node)
            ),
            None,
        )
        if test is not None:
            message = f"each rank tests its own disk (`{text_of(test)}`) to decide whether to resume: ranks with different results diverge"
        elif use.path.spread and use.path.origin & _OWN:
            message = f"each rank looks for `{text_of(use.node)}` on its own disk: ranks may resume from different files"
        else:
            continue
        fix = "let rank 0 decide, and call dist.broadcast_object_list on all ranks before they load"
        yield Found(test if test is not None else call.node, message, fix)


def _is_asked_for(test: ast.AST) -> bool:
    """Whether the environment or an option also decides."""
    return isinstance(test, ast.BoolOp) and any(
        word in ast.unparse(test) for word in ("environ", "getenv", "args.resume")
    )
