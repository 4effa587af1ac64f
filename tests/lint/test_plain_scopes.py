"""Scopes: which name means what."""

from __future__ import annotations

import ast
import sys
import textwrap

import pytest

from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.analyses.undefined import undefined


def _undefined(code: str) -> list[str]:
    return [name.id for name, _ in undefined(scopes_of(ast.parse(textwrap.dedent(code))))]


BOUND = {
    "import with dots": "import torch.nn\ntorch",
    "import as": "import torch.distributed as dist\ndist",
    "for, with, except": "for i in 'a':\n  with open(i) as f:\n    try: f\n    except OSError as e: e",
    "walrus in a comprehension": "[y for x in 'a' if (y := x)]\ny",
    "comprehension reads around": "def f(a):\n  return [a + b for b in a for c in b if c]",
    "class body comprehension": "class A:\n  xs = [1]\n  ys = [x for x in xs]",
    "default in a class": "class A:\n  n = 1\n  def f(self, k=n): return k",
    "global from another function": "def f():\n  global step\n  step = 1\ndef g(): return step",
    "nonlocal": "def f():\n  a = 1\n  def g():\n    nonlocal a\n    a = 2\n    return a",
    "lambda": "f = lambda x, *y, z=1, **k: (x, y, z, k)",
    "used before its line": "def f(): return later()\ndef later(): pass",
    "del": "x = 1\ndel x",
    "builtins": "print(len, ExceptionGroup, WindowsError, exit, __file__, __class__)",
    "match": "match [1]:\n  case {'a': b, **rest}: (b, rest)\n  case [first, *others] as whole: (first, others, whole)",
    "annotation only": "def f(x: Unknown) -> Other:\n  y: Third = 1\n  return y",
    "star targets": "a, *b = [1]\n(c, d) = a, b\nc, d",
    "decorator sees the module": "def deco(f): return f\n@deco\ndef g(): pass",
    "method name as attribute": "class A:\n  def f(self): return self.g()\n  def g(self): pass",
}
UNBOUND = {
    "local of another function": ("def f():\n  a = 1\ndef g():\n  return a", ["a"]),
    "class names are not seen by methods": ("class A:\n  n = 1\n  def f(self): return n", ["n"]),
    "comprehension variables stay inside": ("[i for i in 'a']\ni", ["i"]),
    "the first iterable is read outside": ("[x for x in x]", ["x"]),
    "defaults are read outside": ("def f(a, b=a): pass", ["a"]),
    "class comprehension's second part": ("class A:\n  xs = [1]\n  ys = [x for _ in xs for x in xs]", ["xs"]),
}


@pytest.mark.parametrize("code", BOUND.values(), ids=BOUND)
def test_a_bound_name_is_known(code: str) -> None:
    """Every way to bind a name is seen."""
    assert _undefined(code) == []


@pytest.mark.parametrize(("code", "names"), UNBOUND.values(), ids=UNBOUND)
def test_an_unbound_name_is_told(code: str, names: list[str]) -> None:
    """Python's rules of visibility are kept."""
    assert _undefined(code) == names


@pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12")
def test_type_parameters_are_names() -> None:
    """Type parameters and aliases bind."""
    assert _undefined("def f[T](x): return T\nclass A[U]:\n  def g(self): return U\ntype L[V] = list[V]\nL") == []


DOTTED = {
    "import torch\ntorch.no_grad": "torch.no_grad",
    "import torch.distributed as dist\ndist.barrier": "torch.distributed.barrier",
    "from torch import distributed as d\nd.barrier": "torch.distributed.barrier",
    "from torch.distributed import barrier as b\nb": "torch.distributed.barrier",
    "def f():\n  import torch\n  torch.no_grad": "torch.no_grad",
    "import torch\ntorch = 1\ntorch.no_grad": "",
    "import torch\ndef f(torch):\n  torch.no_grad": "",
    "try:\n  from torch import a\nexcept ImportError:\n  from other import a\na": "",
    "from .torch import a\na": ".torch.a",
}


@pytest.mark.parametrize(("code", "name"), DOTTED.items())
def test_a_full_name_is_given_where_certain(code: str, name: str) -> None:
    """Imports are followed under any alias, and only while nothing else binds the name."""
    tree = ast.parse(code)
    expression = [n for n in ast.walk(tree) if isinstance(n, ast.Expr)][-1].value
    assert scopes_of(tree).dotted(expression) == name
