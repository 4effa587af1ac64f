"""All rules: each module in `rankwise.lint.rules` has one, and its docstring is the rule's page."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.base.errors import UsageError
from rankwise.lint import rules

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from rankwise.lint.piece import Language
    from rankwise.lint.rule import Rule

#: What the hundreds of a rule's id mean.
CHAPTERS = {
    "RW1": "Paths and collectives",
    "RW2": "Process groups, ranks, devices, environment",
    "RW3": "Arguments and results of collectives",
    "RW4": "DistributedDataParallel, FSDP and the model",
    "RW5": "Data, samplers, seeds",
    "RW6": "Checkpoints, metrics, logs",
    "RW7": "Launch commands",
    "RW8": "Plain Python mistakes",
    "RW9": "Text that can't be parsed",
}
_LANGUAGES: dict[str, Language] = {"python": "python", "bash": "shell", "sh": "shell"}
#: So many letters of a name make a part that is told from chance.
_LEAST_PART = 4
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Where the part of the page begins to which the fences below it belong.
_PART = re.compile(r"^(?:(Bad|Good):|\*\*)", re.MULTILINE)


class Examples(NamedTuple):
    """The examples of a rule's page: each one is complete."""

    bad: list[str]
    good: list[str]
    language: Language


@cache
def all_rules() -> tuple[Rule[Any], ...]:
    """Return all rules, sorted by id.

    Raises:
        ValueError: Two rules have the same id or name, or an id is not that of its module.
    """
    return tuple(module.RULE for module in _modules())


def rule(id_or_name: str) -> Rule[Any]:
    """Return the rule of an id (``RW101``, in any case) or a name.

    Raises:
        UsageError: There is none; says which one may be meant.
    """
    known = {word: one for one in all_rules() for word in (one.id.lower(), one.name.lower())}
    word = id_or_name.strip().lower()
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.8) or _list_holding(word, known)
        named = " or ".join(f"{known[one].id} ({known[one].name})" for one in near)
        hint = f"did you mean {named}?" if near else None
        raise UsageError(
            f"there is no rule {id_or_name!r}", hint=hint or "`rankwise rules` lists all of them"
        )
    return known[word]


def _list_holding(word: str, names: Iterable[str]) -> list[str]:
    """Return at most three names of which a word is a part, whatever stands between its own parts."""
    bare = re.sub(r"[\s_-]", "", word)
    return [name for name in names if bare in name.replace("-", "")][:3] if len(bare) >= _LEAST_PART else []


def page(one: Rule[Any]) -> str:
    """Return the page of a rule: the docstring of its module, as Markdown."""
    text = inspect.cleandoc(_module_of(one).__doc__ or "")
    return re.sub(r"(?<!`)``(?!`)", "`", text) + "\n"


def examples(one: Rule[Any]) -> Examples:
    """Return the examples on a rule's page.

    Raises:
        ValueError: The page has none, or in a language that is not checked.
    """
    text = page(one)
    found: dict[str, list[str]] = {"Bad": [], "Good": []}
    languages = set()
    for fence in _FENCE.finditer(text):
        heads = [head[1] for head in _PART.finditer(text, 0, fence.start())]
        if heads and heads[-1] in found:
            found[heads[-1]].append(fence[2])
            languages.add(_LANGUAGES.get(fence[1], fence[1]))
    if not found["Bad"] or languages not in ({"python"}, {"shell"}):
        raise ValueError(
            f"the page of {one.id} needs an example under 'Bad:', all in python or all in bash; "
            f"it has {len(found['Bad'])}, in {sorted(languages)}"
        )
    return Examples(found["Bad"], found["Good"], "python" if languages == {"python"} else "shell")


def chapter(id_: str) -> str:
    """Return the title of the chapter that a rule's id belongs to."""
    return CHAPTERS[id_[:3]]


@cache
def _modules() -> tuple[ModuleType, ...]:
    names = sorted(
        entry.name for entry in pkgutil.iter_modules(rules.__path__) if re.match(r"rw\d{3}_", entry.name)
    )
    modules = tuple(importlib.import_module(f"{rules.__name__}.{name}") for name in names)
    check_modules(modules)
    return modules


def check_modules(modules: tuple[ModuleType, ...]) -> None:
    """Make sure that ids and names are given once and fit their modules.

    Raises:
        ValueError: They are not, or do not.
    """
    seen: dict[str, str] = {}
    for module in modules:
        name, one = module.__name__.rpartition(".")[2], module.RULE
        if not name.startswith(one.id.lower() + "_") or one.id[:3] not in CHAPTERS:
            raise ValueError(f"the rule in {name}.py says that its id is {one.id}")
        for word in (one.id, one.name):
            if word in seen:
                raise ValueError(f"{word} is the rule in {seen[word]}.py and the one in {name}.py")
            seen[word] = name


def _module_of(one: Rule[Any]) -> ModuleType:
    return next(module for module in _modules() if module.RULE is one)
