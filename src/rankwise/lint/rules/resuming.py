"""A run that resumes does not go on where it stopped."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import is_distributed, is_hidden, kind_of, node_in, text_of
from rankwise.lint.analyses.saved_files import is_model_file, reads
from rankwise.lint.analyses.tensors import sources_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Items
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script

_WORDS = {"optimizer": "optimizer", "scheduler": "learning-rate scheduler", "scaler": "gradient scaler"}


@rule("RW608", "warning", "K7", "a resumed run does not restore all the state of the stopped one")
def incomplete_resume(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        calls, loops = entry.histories[0].calls, entry.histories[0].loops
        ranges = [call for call in calls if call.name == "builtins.range" and len(call.args) > 1]
        bounds = [
            *(call.args[0] for call in ranges),
            *(loop.value for _, loop in loops if isinstance(loop.node, ast.While)),
        ]
        for bound in (one for one in bounds if "loaded" in one.origin and is_distributed(entry)):
            load = next(
                (made for one in sources_of(bound, cuts=False) if (made := one.made) and made.name == "torch.load"),
                None,
            )
            if load is not None:
                yield from _left_out(script, calls, load)
                for turns in [call for call in ranges if call.args[0] is bound][:1]:
                    yield from _done_again(calls, turns)
                break


def _left_out(script: Script, calls: list[Call], load: Call) -> Iterator[Found]:
    given = [call for call in calls if call.name.endswith(".load_state_dict")]
    restored = {_part(kind_of(call.receiver)) for call in given}
    made = {_part(call.name) for call in calls if _has_state(call)}
    missing = [part for part in _WORDS if part in made - restored]
    stepped = any(call.name.endswith((".step", ".backward")) and call.loops for call in calls)
    at = node_in(script, load)
    if missing and stepped and given and at is not None and all(map(_is_one_object, given)):
        names = " and ".join(_WORDS[part] for part in missing)
        message = f"the run resumes from here, but the state of the {names} is not loaded: it starts over"
        yield Found(at, message, f"save and load {' and '.join(part + '.state_dict()' for part in missing)} too")


def _is_one_object(call: Call) -> bool:
    """Whether it is known what gets its state: an object, an argument, or what a hidden function has made, but none of several in a loop."""
    what = call.receiver
    return what.thing is not None or what.path.isidentifier() or (what.made is not None and is_hidden(what.made))


def _part(kind: str) -> str | None:
    if kind.startswith(("torch.optim.lr_scheduler.", "transformers.get_")):
        return None if kind.count(".") > 3 else "scheduler"
    if kind.startswith("torch.optim."):
        return None if kind.count(".") > 2 else "optimizer"
    return "scaler" if kind == "torch.amp.GradScaler" else None


def _has_state(call: Call) -> bool:
    """Plain SGD has nothing to lose."""
    momentum = call.arg(2, "momentum")
    return call.name != "torch.optim.SGD" or (momentum is not None and momentum.const != 0)


def _done_again(calls: list[Call], turns: Call) -> Iterator[Found]:
    """``"epoch": epoch`` saved at the end of a turn of the loop that starts at the very number that was loaded."""
    for save in calls:
        table = save.args[0].thing if save.name == "torch.save" and save.args else None
        entries = zip(table.keys, table.values, strict=False) if isinstance(table, Items) and table.keys else ()
        is_late = any(one.loops[:1] == save.loops[:1] and one.name.startswith("torch.") for one in calls[: save.index])
        for key, value in entries:
            # In an inner loop it is saved in the middle of the epoch.
            is_last = save.loops and turns.node in ast.walk(getattr(save.loops[-1], "iter", save.node))
            if value.made is turns and key.const == _key_of(turns.args[0]) and is_last and is_late:
                text = text_of(turns.arg_node(0))
                message = f"{key.const!r} was saved after the epoch of that number was complete: the loop from `{text}` on repeats it"
                yield Found(turns.arg_node(0) or turns.node, message, f"start at {text} + 1")
                return


def _key_of(value: Value) -> object:
    """The key at which a value was loaded; None if something was computed with it since."""
    made = value.made
    if made is None or not made.args:
        return None
    if made.name == "builtins.int":
        return _key_of(made.args[0])
    return made.args[made.name == "operator.Subscript"].const if made.name.endswith((".Subscript", ".get")) else None


_OWN = frozenset({"exists", "files"})


@rule("RW609", "warning", "K8", "each rank decides for itself whether to resume")
def resume_decided_by_each_rank(script: Script) -> Iterator[Found]:
    for use in reads(script):
        call = use.call
        if call.name != "torch.load" or not is_distributed(use.place.entry) or len(use.place.ranks) == 1:
            continue
        if not is_model_file(use):
            continue
        test = next(
            (
                node
                for node, value, _ in call.tests
                # With a second half of the test something else decides, too.
                if value.spread and value.origin & _OWN and not isinstance(node, ast.BoolOp)
            ),
            None,
        )
        if test is not None:
            message = f"each rank tests its own disk (`{text_of(test)}`) to decide whether to resume: ranks with different results diverge"
        elif use.path.spread and use.path.origin & _OWN:
            message = (
                f"each rank looks for `{text_of(use.node)}` on its own disk: ranks may resume from different files"
            )
        else:
            continue
        fix = "let rank 0 decide, and call dist.broadcast_object_list on all ranks before they load"
        yield Found(test if test is not None else call.node, message, fix)
