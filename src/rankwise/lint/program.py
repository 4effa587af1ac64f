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
_MAX_BYTES = 2_000_000


def matters(text: str) -> bool:
    """Whether a text can have anything to do with several processes."""
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
        """Whether running it has to do with ranks, not only calling what it defines."""
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
    """

    roots: tuple[Path, ...] = ()
    read: set[Path] = field(default_factory=set)
    _modules: dict[Path, Module | None] = field(default_factory=dict)
    _files: dict[tuple[Path, str], Path | None] = field(default_factory=dict)

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
        if name.partition(".")[0] in LIBRARIES:
            return None
        bases = dict.fromkeys((importer.path.parent, importer.package[0], *self.roots))
        return next((found for base in bases if (found := self._file_of(base, name)) is not None), None)

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


def _load(path: Path) -> Module | None:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return None
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        return Module(path=path, tree=parse(text), text=text, shown=str(path))
    except (OSError, SyntaxError):
        return None
