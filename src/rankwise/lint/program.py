"""The user's project as text: modules that import each other, found by path and parsed, never imported."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from rankwise.lint.bindings import bindings_of, is_relevant_program, relevant_names

if TYPE_CHECKING:
    from pathlib import Path

#: A text with none of these words has nothing for the abstract run to see.
_WORDS = re.compile(
    r"torch|accelerat|lightning|deepspeed|horovod|fairscale|LOCAL_RANK|WORLD_SIZE|MASTER_|local_rank|is_main_process"
    r"|transformers|rankwise|\brank\b|dist\.|DataLoader"
)
#: Never followed into: they are known by tables, or not at all.
LIBRARIES = frozenset({*sys.stdlib_module_names, *"""
    torch torchvision torchaudio torchtext torchdata torchmetrics accelerate lightning pytorch_lightning lightning_fabric lightning_utilities
    transformers datasets deepspeed megatron apex horovod fairscale colossalai ignite numpy scipy pandas sklearn matplotlib tqdm wandb
    tensorboard tensorboardX PIL cv2 yaml hydra omegaconf ray diffusers peft trl timm mpi4py psutil rich einops safetensors fsspec
    huggingface_hub tokenizers sentencepiece nltk click typer absl tensorflow jax composer torchrec torchtitan mmcv mmengine detectron2 fairseq
    rankwise pytest
""".split()})  # fmt: skip  # noqa: SIM905
#: Calls that start ranks, or join them to a group.
STARTERS = re.compile(r"\b(?:init_process_group|Accelerator|Fabric|init_distributed|spawn|rankwise\.init)\s*\(")
#: A text that does something when it is run: its guard, or a call at its left margin.
_ACTS = re.compile(r"^(?:if\b.*\b__name__\b|[A-Za-z_][\w.]*\()", re.MULTILINE)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*|.+)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
_MAX_BYTES = 2_000_000


def matters(text: str) -> bool:
    """Whether a text can by itself have anything to do with several processes."""
    return _WORDS.search(text) is not None


@lru_cache(maxsize=100)  # a file that is checked is soon imported by its neighbours, or has been
def parse(text: str) -> ast.Module:
    """The tree of a text; as `ast.parse`, but unusual nesting is a SyntaxError as well."""
    try:
        return ast.parse(text)
    except (RecursionError, MemoryError) as error:
        raise SyntaxError("nested too deep to be read") from error
    except ValueError as error:
        raise SyntaxError(str(error)) from error


@dataclass(eq=False, slots=False)
class Module:
    """One file of Python.

    Attributes:
        path: Where it lies; a path that does not exist for code from a notebook or a page.
        tree: Its syntax tree.
        text: Its text.
        shown: The path as the user named it.
    """

    path: Path
    tree: ast.Module
    text: str
    shown: str
    is_fragment: bool = False

    @cached_property
    def lines(self) -> list[str]:
        """Its lines, from 0."""
        return self.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")

    @cached_property
    def has_generators(self) -> bool:
        """Whether any of its functions may yield."""
        return "yield" in self.text

    @cached_property
    def bindings(self) -> dict[str, list[ast.stmt]]:
        """For each name at the top of the module the statements that bind it, in order."""
        return bindings_of(self.tree.body)

    @cached_property
    def relevant(self) -> frozenset[str]:
        """Names of functions and classes here that have to do with ranks, themselves or by what they call here."""
        return relevant_names(self.tree, self.text)

    @cached_property
    def is_program(self) -> bool:
        """Whether running it has to do with ranks by its own words, not only calling what it defines."""
        return is_relevant_program(self.tree, self.relevant, self.text)

    @cached_property
    def package(self) -> tuple[Path, tuple[str, ...]]:
        """The folder from which it is imported, and its dotted name below that."""
        folder, parts = self.path.parent, [] if self.path.stem == "__init__" else [self.path.stem]
        while (folder / "__init__.py").is_file() and folder != folder.parent:
            parts.insert(0, folder.name)
            folder = folder.parent
        return folder, tuple(parts)


@dataclass(eq=False)
class Project:
    """Modules of the user's, parsed once however often they are imported.

    Attributes:
        roots: Folders from which absolute imports are tried, beside the importing file's own.
        read: Files that were looked at for imports, whether or not they exist: what a cached result depends on.
        searched: Files whose text alone was, for what they start; a result depends on them, too.
        program: The file that is studied: whatever it imports may import what lies beside it.
    """

    roots: tuple[Path, ...] = ()
    program: Path | None = None
    read: set[Path] = field(default_factory=set)
    searched: set[Path] = field(default_factory=set)
    _modules: dict[Path, Module | None] = field(default_factory=dict)
    _files: dict[tuple[Path, str], Path | None] = field(default_factory=dict)
    _starts: dict[Path, tuple[bool, tuple[Path, ...]]] = field(default_factory=dict)

    def starts_ranks(self, path: Path, text: str) -> bool:
        """Whether a text is a program of several ranks by what it imports of the project, at first or second hand."""
        if _ACTS.search(text) is None:
            return False
        left = list(self._imports_of(path, text))
        seen = {path, *left}
        for one in left:
            self.searched.add(one)
            if one not in self._starts:
                text = _text_of(one) or ""
                self._starts[one] = STARTERS.search(text) is not None, self._imports_of(one, text)
            is_starter, further = self._starts[one]
            if is_starter:
                return True
            left += [each for each in further if each not in seen]
            seen.update(further)
        return False

    def _imports_of(self, path: Path, text: str) -> tuple[Path, ...]:
        """The files of the project that a text imports, without reading its tree."""
        importer = Module(path=path, tree=ast.Module(body=[], type_ignores=[]), text=text, shown=str(path))
        found: dict[Path | None, None] = {}
        for dots, source, names, modules in _IMPORT.findall(text):
            given = [one.split()[0] for one in (names or modules).lstrip("(").split(",") if one.strip()]
            if not modules:
                inner = [f"{source}.{one}".lstrip(".") for one in given if one.isidentifier()]
                given = [source, *inner] if source else inner
            found.update(dict.fromkeys(self.imported(one, len(dots), importer) for one in given))
        return tuple(one for one in found if one is not None)

    def load(self, path: Path) -> Module | None:
        """The module in a file; None if there is none, or it can't be read."""
        self.read.add(path)
        if path not in self._modules:
            self._modules[path] = _load(path)
        return self._modules[path]

    def loaded(self) -> list[Module]:
        """The modules that were looked at since `read` was emptied."""
        return [module for path in sorted(self.read) if (module := self._modules.get(path)) is not None]

    def imported(self, name: str, level: int, importer: Module) -> Path | None:
        """The file that an import means, or None if it is not the project's."""
        if level:
            folder = importer.path.parent
            for _ in range(level - 1):
                folder = folder.parent
            return self._file_of(folder, name)
        top = name.partition(".")[0]
        if top in LIBRARIES:
            # Python looks beside the script before it looks for what is installed.
            is_ours = top not in sys.stdlib_module_names and self._stands_beside(importer, top)
            return self._file_of(importer.path.parent, name) if is_ours else None
        first = (self.program or importer.path).parent
        bases = dict.fromkeys((importer.path.parent, importer.package[0], first, *self.roots))
        return next((found for base in bases if (found := self._file_of(base, name)) is not None), None)

    def _stands_beside(self, importer: Module, top: str) -> bool:
        """Whether a script has a module of that name beside it, and is not part of that library's own source."""
        folder, key = importer.path.parent, (importer.path.parent, f"{top}?")
        if key not in self._files:
            here = folder / top
            is_source = any((folder / one).is_file() for one in ("__init__.py", "setup.py", "pyproject.toml"))
            is_there = here.with_suffix(".py").is_file() or (here.is_dir() and not is_source)
            self._files[key] = here if is_there else None
        return self._files[key] is not None

    def _file_of(self, folder: Path, name: str) -> Path | None:
        if (folder, name) not in self._files:
            self._files[folder, name] = file_of(folder, name.split(".") if name else [])
        return self._files[folder, name]


def file_of(folder: Path, parts: list[str]) -> Path | None:
    """The file of a module below a folder, or None."""
    here = folder.joinpath(*parts)
    if parts:
        one = here.with_name(here.name + ".py")
        if one.is_file():
            return one
    package = here / "__init__.py"
    return package if package.is_file() else None


def _text_of(path: Path) -> str | None:
    try:
        return None if path.stat().st_size > _MAX_BYTES else path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError:
        return None


def _load(path: Path) -> Module | None:
    text = _text_of(path)
    try:
        return Module(path=path, tree=parse(text), text=text, shown=str(path)) if text is not None else None
    except SyntaxError:
        return None
