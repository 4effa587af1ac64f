"""All probes: each module in `rankwise.doctor.probes` has one, and its docstring is the probe's page."""

from __future__ import annotations

import difflib
import importlib
import re
from functools import cache
from types import ModuleType

from rankwise.base.errors import UsageError
from rankwise.doctor import probes
from rankwise.doctor.probe import TOPICS, Probe


@cache
def _modules() -> dict[str, ModuleType]:
    import pkgutil  # noqa: PLC0415 - a launcher names the probes that it wants

    names = sorted(module.name for module in pkgutil.iter_modules(probes.__path__))
    return {name.replace("_", "-"): _import(name) for name in names}


def _import(id_: str) -> ModuleType:
    return importlib.import_module(f"{probes.__name__}.{id_.replace('-', '_')}")


@cache
def all_probes() -> tuple[Probe, ...]:
    """Return all probes, by topic, then by id; ValueError: A probe's id is not that of its module, or is a topic, too."""
    found: list[Probe] = []
    for name, module in _modules().items():
        if module.PROBE.id != name:
            raise ValueError(f"the probe in {module.__name__} calls itself {module.PROBE.id!r}")
        if name in TOPICS:
            raise ValueError(f"{name} is a probe and a topic: nobody could ask for the probe alone")
        found.append(module.PROBE)
    return tuple(sorted(found, key=lambda one: (TOPICS.index(one.topic), one.id)))


def choose(word: str) -> tuple[Probe, ...]:
    """Return the probe of an id, or those of a topic; UsageError: there is none; says which word may be meant."""
    plain = word.strip().lower().replace("_", "-")
    found = tuple(one for one in all_probes() if plain in {one.id, one.topic})
    if not found:
        near = difflib.get_close_matches(plain, [*(one.id for one in all_probes()), *TOPICS], n=1)
        hint = f"did you mean {near[0]}?" if near else "`rankwise doctor --list` lists all of them"
        raise UsageError(f"there is no probe or topic {word!r}", hint=hint)
    return found


def find(*ids: str) -> tuple[Probe, ...]:
    """Return some probes, and import no others: a launcher has no time for all; ModuleNotFoundError: there is no such probe."""
    return tuple(_import(id_).PROBE for id_ in ids)


def page(one: Probe) -> str:
    """Return the page of a probe: the docstring of its module, as Markdown."""
    import inspect  # noqa: PLC0415 - a launcher, which shows no page, pays for each module

    text = inspect.cleandoc(_modules()[one.id].__doc__ or "")
    return re.sub(r"(?<!`)``(?!`)", "`", text) + "\n"
