"""The pages of the rules for launch commands: their bad examples are found, their good ones are clean."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

from rankwise.lint import rules
from rankwise.lint.piece import Piece
from rankwise.lint.shell.study import study_shell

pytest.importorskip("tree_sitter_bash")

MODULES = [
    importlib.import_module(f"rankwise.lint.rules.{entry.name}")
    for entry in pkgutil.iter_modules(rules.__path__)
    if re.match(r"rw7\d\d_", entry.name) or entry.name == "rw902_text_is_not_shell"
]
FENCE = re.compile(r"^(Bad|Good):\n\n```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def found_in(code: str) -> set[str]:
    shell = study_shell(Piece(path="job.sh", language="shell", code=code))
    return {finding.rule for module in MODULES for finding in module.RULE.check(shell)}


EXAMPLES = [
    pytest.param(module.RULE.id, kind, code, id=f"{module.RULE.id}-{kind}-{number}")
    for module in MODULES
    for number, (kind, code) in enumerate(FENCE.findall(module.__doc__ or ""))
]


@pytest.mark.parametrize(("rule", "kind", "code"), EXAMPLES)
def test_pages_show_what_the_rule_finds(rule: str, kind: str, code: str) -> None:
    """A bad example gives its own rule and no other; a good one gives nothing at all."""
    assert found_in(code) == ({rule} if kind == "Bad" else set())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.RULE.id)
def test_every_page_has_both(module: object) -> None:
    """Each rule shows at least one bad and one good command."""
    kinds = [kind for kind, _ in FENCE.findall(module.__doc__ or "")]
    assert "Bad" in kinds
    assert "Good" in kinds
