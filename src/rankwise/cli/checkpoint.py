"""`rankwise checkpoint`: look at checkpoints, prove that they are whole, and exchange weights with other programs."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import CheckpointError, UsageError
from rankwise.base.flags import Parser
from rankwise.base.terminal import clean_text
from rankwise.checkpoint.contents import find_checkpoint, list_unfinished
from rankwise.checkpoint.folder import list_checkpoints, open_checkpoint, verify
from rankwise.checkpoint.manifest import MANIFEST
from rankwise.cli.checkpoint_inspect import inspect
from rankwise.doctor.units import align, format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rankwise.checkpoint.folder import Checkpoint

_EXIT_CODES = "exit codes: 0 all is valid; 1 something is damaged or missing; 2 the command is wrong"


def main(argv: Sequence[str]) -> int:
    """Run one of the commands; return the exit code."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    command: Callable[[argparse.Namespace], int] = arguments.run
    return command(arguments)


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "rankwise checkpoint",
        description="Look at checkpoints. ls, inspect and verify need no torch.",
        epilog=_EXIT_CODES,
    )
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands", parser_class=Parser)

    def add(name: str, run: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, description=what, epilog=_EXIT_CODES)
        added.set_defaults(run=run)
        return added

    ls = add(
        "ls", _ls, "List the checkpoints of a folder, the latest first; damage is seen in manifests and sizes only."
    )
    ls.add_argument("path", metavar="FOLDER", type=Path, help="the folder that was passed to save()")
    look = add("inspect", inspect, "Show a checkpoint's metadata, its parts and its tensors.")
    look.add_argument("--part", help="only the tensors of this part")
    check = add("verify", _verify, "Read every byte and compare the checksums.")
    out = add("export", _export, "Write the tensors of a part as one safetensors file.")
    for one in (look, check, out):
        one.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a folder of them")
    for one in (look, out):
        one.add_argument("--step", type=int, help="which one of a folder (default: the latest complete one)")
    for one in (ls, look, check):
        one.add_argument("--format", choices=("text", "json"), default="text")
    out.add_argument("target", metavar="OUT.safetensors", type=Path, help="the file to write")
    out.add_argument("--part", default="model", help="the part (default: model)")
    into = add("import", _import, "Make a checkpoint of the weights in a file of torch.save or safetensors.")
    into.add_argument(
        "file", metavar="FILE", type=Path, help="a .pt, .pth or .safetensors file; nothing in it is executed"
    )
    into.add_argument("folder", metavar="FOLDER", type=Path, help="a folder without checkpoints")
    into.add_argument("--step", type=int, default=0, help="the step that training continues from (default: 0)")
    into.add_argument("--key", help="where in the file the weights are, if it holds several: ema, nets.generator")
    return parser


# ---------------------------------------------------------------------- ls


def _ls(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.path
    rows = [_describe(one) for one in _find_all(folder)]
    rows += [
        {
            "name": path.name,
            "path": str(path),
            "step": _read_step(path),
            "state": "half written",
            "problem": None,
        }
        for path in (list_unfinished(folder) if folder.is_dir() else [])
    ]
    if not rows:
        what = f"{folder} holds no checkpoint" if folder.exists() else f"there is no folder {folder}"
        raise CheckpointError(what, hint="pass the folder that was passed to save()")
    if arguments.format == "json":
        print(json.dumps({"folder": str(folder), "checkpoints": rows}, indent=1))
    else:
        cells = [_format_row(row) for row in rows]
        heads = ["name", "size", "ranks", "saved at", "metrics", "state"]
        shown = [n for n in range(len(heads)) if heads[n] != "metrics" or any(row[n] for row in cells)]
        table = [[row[n] for n in shown] for row in [heads, *cells]]
        print(clean_text("\n".join(align(table, right={1, 2}))))
    has_complete = any(row["state"] == "complete" for row in rows)
    return 1 if not has_complete or any(row["state"] == "damaged" for row in rows) else 0


def _read_step(path: Path) -> int | None:
    found = re.match(r"step-(\d+)", path.name)
    return int(found[1]) if found else None


def _find_all(path: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, or the one that the path is."""
    if (path / MANIFEST).exists():
        return [open_checkpoint(path)]
    return list_checkpoints(path)


def _describe(one: Checkpoint) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": one.path.name, "path": str(one.path), "step": one.step}
    if one.manifest is not None:
        m = one.manifest
        facts |= {
            "serial": m.serial,
            "size_bytes": m.size,
            "ranks": m.world_size,
            "saved_at": m.saved_at,
            "metrics": dict(m.metrics),
            "parts": list(m.parts),
        }
    return facts | {"state": "damaged" if one.problem else "complete", "problem": one.problem}


def _format_row(row: dict[str, Any]) -> list[str]:
    size = format_bytes(row["size_bytes"]) if "size_bytes" in row else "-"
    metrics = ", ".join(f"{name}={value:.6g}" for name, value in row.get("metrics", {}).items())
    state = f"damaged: {row['problem']}" if row["problem"] else row["state"]
    return [row["name"], size, str(row.get("ranks", "-")), row.get("saved_at", "-"), metrics, state]


# ------------------------------------------------------------------ verify


def _verify(arguments: argparse.Namespace) -> int:
    path: Path = arguments.path
    # verify() itself says what is wrong with a path that leads to none.
    sizes = {one.path: one.manifest.size if one.manifest else 0 for one in _find_all(path)} or {path: 0}
    results: list[dict[str, Any]] = []
    for one, size in sizes.items():
        problems = verify(one)
        results.append(
            {"path": str(one), "state": "damaged" if problems else "complete", "size_bytes": size, "problems": problems}
        )
        if arguments.format == "text":
            print(f"{one}  " + ("damaged" if problems else f"complete ({format_bytes(size)} read)"), flush=True)
            print("".join(f"  {problem}\n" for problem in problems), end="", flush=True)
    if arguments.format == "json":
        print(json.dumps({"checkpoints": results}, indent=1))
    return 1 if any(result["problems"] for result in results) else 0


# --------------------------------------------------------- export and import


def _export(arguments: argparse.Namespace) -> int:
    # Asked before torch is imported: what is wrong with a path is told at once.
    find_checkpoint(arguments.path, arguments.step)
    target = _load_torch_part().export_safetensors(
        arguments.path, arguments.target, part=arguments.part, step=arguments.step
    )
    print(f"{target}  {format_bytes(target.stat().st_size)}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    path = _load_torch_part().import_file(arguments.file, arguments.folder, step=arguments.step, key=arguments.key)
    print(f"{path}  {format_bytes(open_checkpoint(path).manifest.size)}")  # type: ignore[union-attr]
    return 0


def _load_torch_part() -> Any:
    """Return what needs torch. By its name: the other commands of `rankwise` must never import torch."""
    try:
        return import_module("rankwise.checkpoint.convert")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this command needs torch, and this Python can't import it: {error}",
            hint="run it with the Python that trains; ls, inspect and verify need no torch",
        ) from error
