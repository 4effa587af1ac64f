"""Commands that are given to another shell as text: `bash -c "…"`, `ssh host "…"`, `srun … bash -c "…"`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

    from rankwise.lint.shell.model import Command

_SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
#: These take a command line as text in one of their words, wherever it stands.
_TAKERS = {"ssh", "pdsh", "tmux", "screen", "eval", "gcloud", "parallel-ssh", "pssh", "clush", "watch", "su"}
_STRINGS = {"string", "raw_string"}


def given_scripts(command: Command, nodes: list[Node]) -> list[Node]:
    """The nodes of a command's words that hold the text of another command."""
    names = [(word.text or "").rsplit("/", 1)[-1] for word in command.words]
    strings = [node for node in nodes if node.type in _STRINGS and node.end_byte - node.start_byte > 2]
    if not strings:
        return []
    if names[0] in _TAKERS:
        return [node for node in strings if _looks_like_command(node)]
    if "--wrap" in names or any(name.startswith("--wrap=") for name in names):  # sbatch --wrap "…"
        return [node for node in strings if _looks_like_command(node)]
    for number, name in enumerate(names[:-1]):
        if name in _SHELLS and any(
            flag.startswith("-") and flag.endswith("c") for flag in names[number + 1 : number + 3]
        ):
            return strings[:1]
    return []


def _looks_like_command(node: Node) -> bool:
    text = (node.text or b"").decode(errors="replace")
    return any(word in text for word in ("torchrun", "python", "accelerate", "deepspeed", "rankwise"))
