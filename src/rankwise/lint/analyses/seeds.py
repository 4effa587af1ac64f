"""What the random numbers of a call depend on: the seed that was set before it, if any."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from rankwise.lint.analyses.in_ranks import inside
from rankwise.lint.analyses.job_view import is_hidden
from rankwise.lint.interpreter.values import Spread
from rankwise.lint.library.constructor_table import SEEDS_ALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.history import History
    from rankwise.lint.interpreter.values import Call, Value

Library = Literal["torch", "numpy", "random"]
Seeding = Literal["unset", "equal", "differs", "unknown"]
_SEEDS: dict[str, frozenset[str]] = {
    "torch": frozenset({"torch.manual_seed", "torch.random.manual_seed"}),
    "numpy": frozenset({"numpy.random.seed"}),
    "random": frozenset({"random.seed"}),
}
#: Functions that draw from a generator of the process, and those that make a generator of its own.
DRAWS = re.compile(
    r"torch\.(rand|randn|randint|rand_like|randn_like|randint_like|normal|bernoulli|multinomial|poisson|randperm)"
    r"|numpy\.random\.(rand|randn|randint|random|uniform|normal|choice|beta|binomial|random_sample)"
    r"|random\.(random|randint|uniform|choice|choices|gauss|randrange|sample)"
)
#: What draws only if it is given neither a seed nor weights.
_UNLESS = re.compile(
    r"(sklearn\.datasets\.make_|torchvision\.models\.)\w+|numpy\.random\.(default_rng|RandomState)|random\.Random"
    r"|torch\.nn\.(Linear|Conv\w+|Embedding|LSTM|GRU|RNN|Bilinear|MultiheadAttention|Transformer\w*)"
)


def draws_in(value: Value | None) -> Iterator[Call]:
    """Calls that drew at random what a value was made of, first weights of layers too."""
    for one in inside(value, computed=True):
        calls = (one.made, getattr(one.thing, "call", None))
        yield from (call for call in calls if call is not None and _draws(call))


def _draws(call: Call) -> bool:
    if not _UNLESS.fullmatch(call.name):
        return DRAWS.fullmatch(call.name) is not None
    given = call.arg(0 if "random" in call.name else None, "random_state", "seed", "weights", "pretrained")
    return given is None or given.const is None or given.const is False or given.spread is not Spread.EQUAL


def library_of(name: str) -> Library:
    """Whose generator a function draws from."""
    if name.startswith(("torch", "?.")):
        return "torch"
    return "random" if name.startswith("random.") else "numpy"


def last_seed(history: History, before: Call, library: Library) -> Call | None:
    """The last call before another that set the seed of a library."""
    names = _SEEDS[library] | SEEDS_ALL
    found = None
    for call in history.calls[: before.index]:
        if call.name in names or (call.name.startswith("?") and "seed" in call.name):
            found = call
    return found


def find_seeding(history: History, before: Call, library: Library) -> Seeding:
    """Whether ranks draw the same at a call, as far as is known."""
    seed = last_seed(history, before, library)
    if seed is None:
        # A function out of sight may have set it.
        hidden = any(is_hidden(call) for call in history.calls[: before.index])
        return "unknown" if hidden else "unset"
    given = [*seed.args, *seed.kwargs.values()]
    specific = seed.kwargs.get("device_specific")
    if specific is not None and specific.const is True:
        return "differs"
    if any(value.spread for value in given):
        return "differs"
    return "unknown" if seed.name.startswith("?") or seed.has_star or seed.tests else "equal"
