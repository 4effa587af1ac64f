"""What a script needs before its first line, read from its text: which modules to preload, or why to start cold.

Only the text is looked at, that of the script and of the modules beside it that it imports; nothing is imported.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankwise.public_names import HOMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Prefixes of the variables that torch and what it imports read once, when they are imported.
LATCHED = (
    "AOT_", "AOTINDUCTOR_", "PT2_", "NUMPY_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_NUM_THREADS", "BLIS_", "VECLIB_", "NUMEXPR_", "DNNL_",
    "ONEDNN_", "MKLDNN_", "KINETO_USE_DAEMON", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_", "TORCH_CACHING_",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_LOGS", "TORCH_TRACE", "TORCH_DTRACE", "TORCH_COMPILE", "TORCH_CUDAGRAPH_GC",
    "TORCH_CUDA_SANITIZER", "TORCH_DYNAMO_", "TORCH_ENRICH_", "TORCH_FAKE_TENSOR_", "TORCH_PYTHON_NATIVE_", "TORCH_STRICT_",
    "TORCH_USE_RTLD_GLOBAL", "TORCHDYNAMO_", "TORCHEXPORT_", "TORCHINDUCTOR_", "PYTORCH_JIT", "PYTORCH_MATCHER_",
    "PYTORCH_NVFUSER", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "NPY_", "OPENSSL_CONF", "LD_", "ATEN_CPU_CAPABILITY", "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_BLAS_PREFER", "TQDM_", "LOGLEVEL", "LOG_TLPARSE", "LOG_AUTOTUNE_RESULTS", "UNSAFE_SKIP_FSDP", "DUMP_AOTI_MINIFIER",
    "FAKE_ALLOW_META", "ENABLE_PERSISTENT_TMA", "ENABLE_TEMPLATE_TMA", "ENABLE_TMA_LOAD", "CUTEDSL_", "NVPL_", "TORCH_LINALG_PREFER", "TORCH_ROCM_", "TORCH_SYMMMEM", "TORCH_VITAL", "TORCH_CUSTOM_TERMINATE",
    "PYTORCH_API_USAGE", "INDUCTOR_", "FX_", "PARTITIONER_", "COMPILE_STROBELIGHT_", "TRITON_", "CUBLASLT_", "CUBLAS_LOG",
    "CUTLASS_", "SYMPY_", "MPMATH_", "FSSPEC_",
)  # fmt: skip
# Building DDP or FSDP, or an optimizer, imports the compiler: 0.7 s that a script without them must not pay.
_COMPILER = "torch._dynamo"
_NEEDS_COMPILER = {
    "DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard", "optim", "compile",
    "ZeroRedundancyOptimizer", "Optimizer",
}  # fmt: skip
# Frameworks that build one of these inside; their own import is the user's to ask for.
_FRAMEWORKS = {
    "accelerate", "composer", "deepspeed", "fastai", "ignite", "lightning", "lightning_fabric",
    "pytorch_lightning", "timm", "torchtitan", "transformers", "trl",
}  # fmt: skip
# Well-known packages that do not import torch: a script of these alone need not wait for it.
_WITHOUT_TORCH = {
    "PIL", "absl", "aiohttp", "attr", "attrs", "boto3", "click", "cloudpickle", "cv2", "dill", "dotenv", "fastapi",
    "fire", "flask", "flax", "google", "grpc", "h5py", "httpx", "hydra", "jax", "jaxlib", "jinja2", "joblib", "keras",
    "loguru", "matplotlib", "mpi4py", "msgpack", "networkx", "numba", "numpy", "omegaconf", "optax", "orjson", "packaging",
    "pandas", "polars", "psutil", "pyarrow", "pydantic", "pytest", "redis", "requests", "rich", "scipy", "seaborn",
    "setuptools", "sklearn", "sqlalchemy", "structlog", "sympy", "tabulate", "tensorflow", "termcolor", "toml", "tomli",
    "tqdm", "typer", "typing_extensions", "ujson", "yaml", "zarr", "zmq",
}  # fmt: skip
_DEBUGGERS = {"debugpy", "pydevd", "pydevd_pycharm", "ddtrace", "pytest_cov"}
# Imported by name these start threads, processes or drivers.
_NOT_BEFORE_A_FORK = ("torch.utils.tensorboard", "torch._inductor", "torch.cuda", "torch.utils.cpp_extension")
_MOST_FILES, _MOST_BYTES = 200, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to start the ranks of a script.

    Attributes:
        modules: What the warm server imports before the first fork; empty for a cold start.
        cold: Why there is no warm start; empty if there is one.
        is_expected: Whether a user could have known the reason: then it is not worth a line.
        first_path: The folder that the script will have in front of its sys.path.
        packages: Installed packages that the script imports, beside torch: what the user may want preloaded.
        wanted: What it imports from them, as (module, name); many load their parts only when asked for one.
    """

    modules: tuple[str, ...] = ()
    cold: str = ""
    is_expected: bool = False
    first_path: Path | None = None
    packages: tuple[str, ...] = ()
    wanted: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class _Text:
    """What one file, and those that it imports, say."""

    imports: set[str] = field(default_factory=set)
    early: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    wanted: dict[tuple[str, str], None] = field(default_factory=dict)
    is_dynamic: bool = False
    latched: str = ""


def plan_start(program: str, *, is_module: bool, cwd: Path) -> Plan:
    """Read a script and what it imports from beside it.

    Args:
        program: Path of the script, or name of the module.
        is_module: Whether it is started by ``python -m``.
        cwd: The folder that the ranks start in.
    """
    path = _find_module(program, cwd) if is_module else cwd / program
    first = cwd if is_module else path.resolve().parent if path is not None else cwd
    if is_module and program.partition(".")[0] in _DEBUGGERS:
        return Plan(cold=f"{program} is a debugger", first_path=first)
    if path is None:
        # An installed module: it is somebody's trainer, and may be anything.
        return Plan(modules=("torch", _COMPILER), first_path=first)
    text = _Text()
    try:
        seen: set[Path] = set()
        for file in [*(_find_local(program, path, first) if is_module else ()), path]:
            _read(file, first, text, seen)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        return Plan(cold=f"{path.name} can't be read: {type(error).__name__}", is_expected=True, first_path=first)
    return _decide(text, first)


def _decide(text: _Text, first: Path) -> Plan:
    tops = {name.partition(".")[0] for name in text.imports}
    if debuggers := tops & _DEBUGGERS:
        return Plan(cold=f"the script uses {min(debuggers)}", first_path=first)
    if text.latched:
        return Plan(cold=text.latched, first_path=first)
    foreign = tops - set(sys.stdlib_module_names) - {"__future__"}
    if not foreign - _WITHOUT_TORCH and not text.is_dynamic:
        return Plan(cold="the script imports nothing heavy", is_expected=True, first_path=first)
    modules = ["torch"]
    if text.names & _NEEDS_COMPILER or tops & _FRAMEWORKS:
        modules.append(_COMPILER)
    modules += sorted(
        name for name in text.early if name.startswith("torch.") and not name.startswith(_NOT_BEFORE_A_FORK)
    )
    if "rankwise" in tops:
        modules += [
            "rankwise.runtime.joining",
            *sorted({HOMES[name] for name in text.names & HOMES.keys()}),
        ]
    packages = sorted(foreign - {"torch", "numpy", "rankwise"})
    wanted = tuple((module, name) for module, name in text.wanted if module.partition(".")[0] in packages)
    return Plan(modules=tuple(dict.fromkeys(modules)), first_path=first, packages=tuple(packages), wanted=wanted)


def _find_module(name: str, cwd: Path) -> Path | None:
    """Return the file that ``python -m name`` runs, if it lies below the current folder."""
    base = cwd.joinpath(*name.split("."))
    for path in (base / "__main__.py", base.with_name(f"{base.name}.py")):
        if path.is_file():
            return path
    return None


def _read(path: Path, first: Path, text: _Text, seen: set[Path]) -> None:
    """Add what a file says, and what the modules beside it say that it imports."""
    path = path.resolve()
    if path in seen or len(seen) >= _MOST_FILES:
        return
    seen.add(path)
    source = path.read_bytes()
    if len(source) > _MOST_BYTES:
        text.is_dynamic = True
        return
    tree = ast.parse(source)
    found = list(_list_imports(tree))
    text.early.update(name for name, is_early in found if is_early)
    _note_names(tree, text)
    text.wanted.update(
        dict.fromkeys(
            (node.module or "", alias.name)
            for node in _walk_top_level(tree)
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        )
    )
    text.latched = text.latched or _find_late_setting(tree, path)
    for name in dict.fromkeys(name for name, _ in found):
        local = list(_find_local(name, path, first))
        if not local:
            text.imports.add(name)
        for file in local:
            _read(file, first, text, seen)


def _list_imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Give each imported name, with dots in front if it is relative, and whether the file imports it at once."""
    at_once = {id(node) for node in _walk_top_level(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in at_once
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield name, id(node) in at_once
            # `from package import module` names a module too, and only the package's folder tells.
            for alias in node.names:
                yield f"{name}{'' if name.endswith('.') else '.'}{alias.name}", False


def _walk_top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Give the statements that run when the file is imported."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop(0)
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            todo += [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            todo += [inner for handler in getattr(node, "handlers", []) for inner in handler.body]


def _note_names(tree: ast.Module, text: _Text) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            # re.compile is no compiler of models; nor is the builtin.
            is_regex = isinstance(node.value, ast.Name) and node.value.id in {"re", "regex"}
            name = "" if is_regex else node.attr
        elif isinstance(node, ast.Name):
            name = "" if node.id == "compile" else node.id
        elif isinstance(node, ast.alias):
            name = node.name.rpartition(".")[2]
        elif isinstance(node, ast.ImportFrom):
            text.names.update((node.module or "").split("."))
            continue
        else:
            continue
        text.names.add(name)
        if name in {"__import__", "import_module", "exec", "runpy", "run_path"}:
            text.is_dynamic = True


def _find_local(name: str, importer: Path, first: Path) -> Iterator[Path]:
    """Give the files below the script's folder that an import runs: the packages on the way, and the module."""
    level = len(name) - len(name.lstrip("."))
    base = first
    if level:
        base = importer.parent
        for _ in range(level - 1):
            base = base.parent
    for part in name.lstrip(".").split("."):
        base = base / part if part else base
        for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if path.is_file() and path != importer:
                yield path
                break


def _find_late_setting(tree: ast.Module, path: Path) -> str:
    """Tell which variable the file sets that torch would read, if not after its own import of torch."""
    has_torch_from = min(
        (node.lineno for node in _walk_top_level(tree) if _is_torch(node)),
        default=sys.maxsize,
    )
    for node in ast.walk(tree):
        name = _get_set_name(node)
        if name and name.startswith(LATCHED) and getattr(node, "lineno", 0) < has_torch_from:
            return f"{path.name}:{getattr(node, 'lineno', 0)} sets {name} before it imports torch"
    return ""


def _is_torch(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "torch" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"


def _get_set_name(node: ast.AST) -> str:
    """Return the variable that a node sets or removes, by ``os.environ[…] = …`` or a call; else the empty string."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, (ast.Store, ast.Del))
        and _ends_with_environ(node.value)
    ):
        return _get_text(node.slice)
    if isinstance(node, ast.AugAssign) and _ends_with_environ(node.target):
        return _get_key(node.value)
    if not isinstance(node, ast.Call):
        return ""
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    of_environ = isinstance(called, ast.Attribute) and _ends_with_environ(called.value)
    if name in {"putenv", "unsetenv"} or (of_environ and name in {"setdefault", "pop", "__setitem__"}):
        return _get_text(node.args[0]) if node.args else ""
    if of_environ and name == "update":
        names = [keyword.arg or "" for keyword in node.keywords] + [_get_key(argument) for argument in node.args]
        return next((name for name in names if name.startswith(LATCHED)), "")
    return ""


def _get_key(node: ast.expr) -> str:
    """Return the first key of a dictionary, as it is written, that torch would read; else the empty string."""
    names = [_get_text(key) for key in node.keys if key is not None] if isinstance(node, ast.Dict) else []
    return next((name for name in names if name.startswith(LATCHED)), "")


def _ends_with_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb"}) or (
        isinstance(node, ast.Name) and node.id in {"environ", "environb"}
    )


def _get_text(node: ast.expr) -> str:
    value = node.value if isinstance(node, ast.Constant) else ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
