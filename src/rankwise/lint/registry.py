"""All rules: those that the modules in `rankwise.lint.rules` define; the page of each is docs/rules/check/ID.md."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.base.errors import UsageError
from rankwise.lint import rules
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.lint.code_unit import Language

#: What the hundreds of a rule's id mean.
CHAPTERS = {"RW1": "Paths and collectives", "RW2": "Process groups, ranks, devices, environment", "RW3": "Arguments and results of collectives",
            "RW4": "DistributedDataParallel, FSDP and the model", "RW5": "Data, samplers, seeds", "RW6": "Checkpoints, metrics, logs",
            "RW7": "Launch commands", "RW8": "Plain Python mistakes", "RW9": "Text that can't be parsed"}  # fmt: skip
_LANGUAGES: dict[str, Language] = {"python": "python", "bash": "shell", "sh": "shell"}
#: So many letters of a name make a part that is told from chance.
_LEAST_PART = 4
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Where the part of the page begins to which the fences below it belong.
_PART = re.compile(r"^(?:(Bad|Good):|\*\*)", re.MULTILINE)
#: What `make docs` writes around a page.
_FRAME = re.compile(r"\A# RW\d+: .*\n\n.*\n|^\*\*To silence it\*\* .*\n", re.MULTILINE)


class Examples(NamedTuple):
    """The examples of a rule's page: each one is complete."""

    bad: list[str]
    good: list[str]
    language: Language


@cache
def all_rules() -> tuple[Rule[Any], ...]:
    """Return all rules, sorted by id."""
    modules = (importlib.import_module(f"{rules.__name__}.{one.name}") for one in pkgutil.iter_modules(rules.__path__))
    return in_order(one for module in modules for one in vars(module).values() if isinstance(one, Rule))


def in_order(found: Iterable[Rule[Any]]) -> tuple[Rule[Any], ...]:
    """Return rules sorted by id.

    Raises:
        ValueError: Two have the same id or name, or one is of no chapter.
    """
    seen: dict[str, Rule[Any]] = {}
    for one in found:
        if one.id[:3] not in CHAPTERS:
            raise ValueError(f"{one.name} has the id {one.id}, which belongs to no chapter")
        for word in (one.id, one.name):
            if seen.setdefault(word, one) is not one:
                raise ValueError(f"{word} is both {seen[word].id} ({seen[word].name}) and {one.id} ({one.name})")
    return tuple(sorted(set(seen.values()), key=lambda one: one.id))


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
        raise UsageError(f"there is no rule {id_or_name!r}", hint=hint or "`rankwise rules` lists all of them")
    return known[word]


def _list_holding(word: str, names: Iterable[str]) -> list[str]:
    """Return at most three names of which a word is a part, whatever stands between its own parts."""
    bare = re.sub(r"[\s_-]", "", word)
    return [name for name in names if bare in name.replace("-", "")][:3] if len(bare) >= _LEAST_PART else []


def docs_folder() -> Path | None:
    """Return the folder of the pages: in a wheel it lies inside the package, in a clone beside `src`."""
    package = Path(__file__).parents[1]
    return next((one for one in (package / "docs", package.parents[1] / "docs") if one.is_dir()), None)


def page(one: Rule[Any]) -> str:
    """Return the page of a rule as Markdown, without what `make docs` writes around it: its title and its last line."""
    folder = docs_folder()
    if folder is None:
        return f"{one.summary[0].upper()}{one.summary[1:]}.\n"
    return page_body((folder / "rules" / "check" / f"{one.id}.md").read_text(encoding="utf-8"))


def page_body(text: str) -> str:
    """Return what of a page's text is written by hand."""
    return _FRAME.sub("", text).strip("\n") + "\n"


def examples(one: Rule[Any]) -> Examples:
    """Return the examples on a rule's page.

    Raises:
        ValueError: The page has none, or in a language that is not checked.
    """
    id_, text = one.id, page(one)
    found: dict[str, list[str]] = {"Bad": [], "Good": []}
    languages = set()
    for fence in _FENCE.finditer(text):
        heads = [head[1] for head in _PART.finditer(text, 0, fence.start())]
        if heads and heads[-1] in found:
            found[heads[-1]].append(fence[2])
            languages.add(_LANGUAGES.get(fence[1], fence[1]))
    if not found["Bad"] or languages not in ({"python"}, {"shell"}):
        raise ValueError(
            f"the page of {id_} needs an example under 'Bad:', all in python or all in bash; "
            f"it has {len(found['Bad'])}, in {sorted(languages)}"
        )
    return Examples(found["Bad"], found["Good"], "python" if languages == {"python"} else "shell")


def chapter(id_: str) -> str:
    """Return the title of the chapter that a rule's id belongs to."""
    return CHAPTERS[id_[:3]]
