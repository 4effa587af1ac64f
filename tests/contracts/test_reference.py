"""The reference of the public names is what their docstrings say, that of the commands what their parsers say, and both are complete."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rankwise
import rankwise.testing

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


def load_script(name: str) -> Any:
    """Import a script of docs/, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script("generate_reference")
commands = load_script("generate_cli")


def public_calls() -> Iterator[tuple[str, Any]]:
    """Yield every public function and method with its name."""
    for title, names in script.GROUPS.items():
        home = script.HOMES.get(title, rankwise)
        for name in names:
            value = getattr(home, name)
            if not inspect.isclass(value):
                yield name, value
                continue
            for member, method in vars(value).items():
                is_told = script.is_told_by_family(value, member)
                if inspect.isfunction(method) and not member.startswith("_") and not is_told:
                    yield f"{name}.{member}", method


def test_reference_is_up_to_date() -> None:
    """docs/reference/api.md holds what the docstrings say now, letter for letter."""
    shown, now = script.TARGET.read_text(encoding="utf-8").splitlines(), script.render().splitlines()
    differing = [pair for pair in zip(shown, now, strict=False) if pair[0] != pair[1]]
    first = "\n".join(differing[0]) if differing else f"{len(shown)} and {len(now)} lines"
    assert shown == now, f"docs/reference/api.md is older than the docstrings: run `make docs`\n{first}"


def test_reference_of_commands_is_up_to_date() -> None:
    """docs/reference/cli.md has every flag of every command with the help that the command shows."""
    assert commands.TARGET.read_text(encoding="utf-8") == commands.render(), "run `make docs`"


def test_a_public_name_cannot_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new public name that stands in no group of the reference is an error that names it."""
    monkeypatch.setattr(rankwise, "__all__", [*rankwise.__all__, "new_name"])
    with pytest.raises(ValueError, match="new_name"):
        script.render()


@pytest.mark.parametrize(("name", "function"), [pytest.param(*call, id=call[0]) for call in public_calls()])
def test_every_parameter_is_documented(name: str, function: Any) -> None:
    """The parameters under Args are those of the signature, in its order, and what is returned is told."""
    signature, sections = inspect.signature(function), script.split_docstring(function.__doc__)
    told = [
        item.partition("`")[2].partition("`")[0].lstrip("*") for item in script.write_items(sections.get("Args", []))
    ]
    assert told == [parameter for parameter in signature.parameters if parameter not in {"self", "cls"}], name
    gives = signature.return_annotation not in {"None", inspect.Signature.empty, "Iterator[None]"}
    # One line may be all that there is to say: "Return the context ...".
    says = {"Returns", "Yields"} & set(sections) or function.__doc__.startswith("Return ")
    assert bool(says) >= gives, f"{name} does not tell what it returns"


@pytest.mark.parametrize(
    "name", [name for name in script.GROUPS["Collectives"] if name not in {"Group", "set_checking"}]
)
def test_every_collective_says_who_must_call(name: str) -> None:
    """The docstring of each collective has the line that tells which ranks must call it."""
    assert "Collective" in script.split_docstring(getattr(rankwise, name).__doc__)


def test_split_docstring() -> None:
    """Items with continuations become one line each, and text before the sections stays apart."""
    sections = script.split_docstring("""Do it.

        Args:
            x: First
                and more.
            *rest: Others.

        Collective: all ranks,
        always.
    """)
    assert sections[""] == ["Do it.", ""]
    assert list(script.write_items(sections["Args"], {"x": "int"})) == [
        "- `x` (`int`): First and more.",
        "- `*rest`: Others.",
    ]
    assert sections["Collective"] == ["all ranks,", "always."]
