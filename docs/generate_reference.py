"""Write docs/reference/api.md from the docstrings of the public names: nothing there is written by hand."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rankwise
import rankwise.checkpoint
import rankwise.data.metrics
import rankwise.testing
import rankwise.tf
import rankwise.train

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = Path(__file__).parent / "reference" / "api.md"
_LONGEST_LINE = 100

GROUPS = {
    "Joining a job": ["init", "current", "RankContext", "BatchPlan"],
    "Collectives": [
        "all_reduce", "all_reduce_", "reduce", "broadcast", "broadcast_", "all_gather", "gather", "all_gather_into", "gather_into",
        "scatter", "all_to_all", "reduce_scatter", "barrier", "all_reduce_with_grad", "all_gather_with_grad", "new_group", "Group",
        "set_checking",
    ],
    "DistributedDataParallel": [
        "apply_ddp", "accumulate", "loss_scale", "clip_grad_norm_", "check_replicas", "convert_sync_batchnorm", "SyncBatchNorm", "PowerSGD", "Tuning",
    ],
    "Parameter servers": ["parameter_server", "ParameterServer", "ServedEmbedding"],
    "Large models": [
        "apply_fsdp", "apply_zero1", "apply_tensor_parallel", "apply_pipeline", "Pipeline", "PipelineProfile", "apply_checkpointing", "place", "placement_of", "Placement", "Mesh", "plan", "Plan",
    ],
    "Data": ["DataLoader", "Step", "GlobalBatchSampler", "DistributedSampler", "evaluate", "predict"],
    "Metrics": ["Metric", "Mean", "Accuracy", "ConfusionMatrix", "MeanSquaredError", "Perplexity", "Sum", "Extreme"],
    "Checkpoints": [
        "save", "Saving", "Keep", "PerRank", "check", "load", "read", "latest", "list_checkpoints", "verify", "export_safetensors",
        "import_weights",
    ],
    "Training": ["Trainer", "TrainerConfig"],
    "Parts of the Trainer": [
        "Track", "Evaluation", "Callback", "GlobalDropout", "replace_dropout", "same_masks", "placed", "choose_fused", "read_journal", "Journal", "Started", "Report", "Evaluated", "Ended",
        "Logger", "JsonLines", "CsvLines", "Curves", "Progress", "TensorBoard", "WandB",
    ],
    "The API of tf.distribute": [
        "Strategy", "OneDeviceStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy", "CentralStorageStrategy", "ParameterServerStrategy",
        "get_strategy", "has_strategy", "ReplicaContext", "get_replica_context", "in_cross_replica_context", "ReduceOp", "aggregate_gradients",
        "compute_average_loss", "scale_regularization_loss", "DistributedDataset", "InputContext", "InputOptions",
        "AutoShardPolicy", "Variable", "VariableAggregation", "VariableSynchronization",
        "ClusterCoordinator", "RemoteValue", "PerWorkerDataset", "PerWorkerIterator", "MinSizePartitioner", "CommunicationOptions",
        "CommunicationImplementation", "ClusterResolver", "ClusterSpec", "TFConfigClusterResolver", "SlurmClusterResolver", "KubernetesClusterResolver",
        "SimpleClusterResolver", "BackupAndRestore", "Checkpoint", "CheckpointManager", "PreemptionCheckpointHandler", "TerminationConfig", "latest_checkpoint",
    ],
    "Launching": ["launch", "RankEnv", "submit", "JobHandle", "JobState"],
    "Errors": [
        "RankwiseError", "UsageError", "LaunchError", "RankFailedError", "RendezvousError", "HandshakeError", "CollectiveError",
        "CollectiveTimeoutError", "ModelError", "DataError", "CheckpointError", "NumericsError",
    ],
    "Testing": ["run_ranks", "try_ranks", "RankOutcome"],
}  # fmt: skip
#: Users get these from calls, and don't make them.
GIVEN = {
    "Pipeline",
    "RankContext",
    "BatchPlan",
    "Mesh",
    "Group",
    "JobHandle",
    "JobState",
    "RankOutcome",
    "Saving",
    "Step",
    "Metric",
    "Started",
    "Report",
    "Evaluated",
    "Ended",
    "Journal",
    "Plan",
    "Placement",
}
#: What every metric and every logger has is told once, there.
FAMILIES = {
    rankwise.data.metrics.Metric: {*GROUPS["Metrics"]} - {"Metric"},
    rankwise.train.Logger: {"JsonLines", "CsvLines", "Curves", "Progress", "TensorBoard", "WandB"},
}
#: Groups whose names are not in `rankwise` itself.
HOMES = {
    "Checkpoints": rankwise.checkpoint,
    "Metrics": rankwise.data.metrics,
    "Testing": rankwise.testing,
    "The API of tf.distribute": rankwise.tf,
    "Parts of the Trainer": rankwise.train,
}
_HEAD = """\
# Public names

This page is made from the docstrings by `make docs`. All names are in `rankwise`, those under [Metrics](#metrics) in `rankwise.data.metrics`, those under [Checkpoints](#checkpoints) in `rankwise.checkpoint`, those under [Parts of the Trainer](#parts-of-the-trainer) in `rankwise.train`, those under [The API of tf.distribute](#the-api-of-tfdistribute) in `rankwise.tf`, those under [Testing](#testing) in `rankwise.testing`. What is not here is not public.

*Collective* says who must call together. A call that only some ranks make leaves them waiting for the others, until a timeout names those.
"""
_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Collective):\s*(.*)")
_ITEM = re.compile(r"(\*{0,2}[\w.]+): (.*)")


def split_docstring(text: str) -> dict[str, list[str]]:
    """Return the lines of each section; those before the first one are under ""."""
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(text).splitlines():
        found = _SECTION.fullmatch(line)
        if found:
            name = found[1]
            sections[name] = [found[2]] if found[2] else []
        else:
            sections[name].append(line)
    return sections


def write_items(lines: list[str], types: dict[str, str] | None = None) -> Iterator[str]:
    """Turn ``name: text`` with indented continuations into a list, with each name's type if it is known."""
    texts: list[str] = []
    for line in lines:
        if line.startswith("    ") and not line.startswith("     "):
            texts.append(line.strip())
        elif line.strip():
            texts[-1] += " " + line.strip()
    for text in texts:
        found = _ITEM.fullmatch(text)
        if found is None:
            raise ValueError(f"not 'name: text': {text!r}")
        kind = (types or {}).get(found[1])
        yield f"- `{found[1]}`{f' (`{kind}`)' if kind else ''}: {found[2]}"


def write_docstring(owner: Any, name: str, types: dict[str, str] | None = None) -> Iterator[str]:
    """Turn a docstring into Markdown: the effect, then the sections as lists and lines."""
    if not owner.__doc__:
        raise ValueError(f"{name} has no docstring")
    sections = split_docstring(owner.__doc__)
    for has_text, body in groupby(sections.pop(""), key=lambda line: bool(line.strip())):
        if has_text:
            yield from (" ".join(body), "")
    for title, lines in sections.items():
        if title in {"Returns", "Yields", "Collective"}:
            yield from (f"**{title}:** {' '.join(' '.join(lines).split())}", "")
        else:
            yield from (f"**{title}:**", "", *write_items(lines, types), "")


def write_signature(name: str, function: Any) -> Iterator[str]:
    """Show a call as an indented block: on one line, or with a line for each parameter."""
    signature = inspect.signature(function)
    shown: list[str] = []
    was_keyword = False
    for parameter in signature.parameters.values():
        if parameter.name in {"self", "cls"}:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            was_keyword = True
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not was_keyword:
            shown.append("*")
            was_keyword = True
        shown.append(_write_parameter(parameter))
    result = signature.return_annotation
    end = ")" if result in {inspect.Signature.empty, None, "None"} else f") -> {_name_type(result)}"
    line = f"    {name}({', '.join(shown)}{end}"
    if len(line) <= _LONGEST_LINE:
        yield line
    else:
        yield f"    {name}("
        yield from (f"        {parameter}," for parameter in shown)
        yield f"    {end}"


def _write_parameter(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    text = stars + parameter.name
    has_type = parameter.annotation is not inspect.Parameter.empty
    if has_type:
        text += f": {_name_type(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        default = repr(parameter.default)
        if isinstance(parameter.default, enum.Enum):
            default = f"{type(parameter.default).__name__}.{parameter.default.name}"
        if " at 0x" in default or default.startswith("<"):
            raise ValueError(f"the default of {parameter.name} is shown as {default}, which differs from run to run")
        text += f" = {default}" if has_type else f"={default}"
    return text


def _name_type(annotation: Any) -> str:
    """Return the text that stands in the source: with ``from __future__ import annotations`` it is kept."""
    if not isinstance(annotation, str):
        return "None" if annotation is None else str(annotation.__name__)
    return str(annotation)


def write_function(name: str, function: Any) -> Iterator[str]:
    """Write signature and docstring of a function."""
    yield from (*write_signature(name, function), "", *write_docstring(function, name))


def write_class(name: str, kind: type) -> Iterator[str]:
    """Write a class: how to make it if users do, its attributes, and its own public methods and properties."""
    if issubclass(kind, Exception):
        parent = kind.__mro__[1]
        if parent is not Exception:
            yield from (f"A `{parent.__name__}`.", "")
        if "__init__" in vars(kind):
            yield from (*write_signature(name, kind.__init__), "")
        yield from write_docstring(kind, name)
        return
    types: dict[str, str] = {}
    if dataclasses.is_dataclass(kind):
        types = {field.name: _name_type(field.type) for field in dataclasses.fields(kind)}
    yield from write_making(name, kind)
    yield from write_docstring(kind, name, types)
    for member, value in vars(kind).items():
        if member.startswith("_") or is_told_by_family(kind, member):
            continue
        if isinstance(value, property):
            result = _name_type(inspect.signature(value.fget).return_annotation) if value.fget else ""
            yield from (
                f"#### {name}.{member}",
                "",
                f"    {member}: {result}",
                "",
                *write_docstring(value, member),
            )
        elif inspect.isfunction(value):
            yield from (f"#### {name}.{member}", "", *write_function(member, value))


def write_making(name: str, kind: type) -> Iterator[str]:
    """Show how users come by an instance, if not from us: the members of an enumeration, or the constructor's call."""
    if issubclass(kind, enum.Enum):
        yield from (f"    {', '.join(f'{name}.{member}' for member in kind.__members__)}", "")
    elif name not in GIVEN:
        yield from (*write_signature(name, kind.__init__ if "__init__" in vars(kind) else kind), "")


def is_told_by_family(kind: type, member: str) -> bool:
    """Tell whether what a class has is told at the protocol that it fulfils."""
    return any(kind.__name__ in names and member in vars(family) for family, names in FAMILIES.items())


def _link_source(value: Any) -> str:
    """Link the file that defines a name; on the site, where there is no clone around the page, only its path is left."""
    path = Path(inspect.getfile(inspect.unwrap(value))).relative_to(Path(rankwise.__file__).parents[1]).as_posix()
    return f"Source: [src/{path}](../../src/{path})"


def check_groups() -> None:
    """Make sure that every public name stands in one group."""
    listed = sorted(name for names in GROUPS.values() for name in names)
    public = sorted(
        {*rankwise.__all__, *(name for home in HOMES.values() for name in home.__all__)}
        - {"__version__", "checkpoint", "tf", "train", "REQUEUE"}
    )
    if listed != public:
        different = sorted(set(listed) ^ set(public)) or "a name stands in two groups"
        raise ValueError(f"GROUPS in {Path(__file__).name} and the public names differ: {different}")


def render() -> str:
    """Return the page."""
    check_groups()
    lines = [_HEAD]
    for title, names in GROUPS.items():
        lines.append(
            f"- [{title}](#{title.lower().replace(' ', '-').replace('.', '')}): "
            + ", ".join(f"[`{name}`](#{name.lower()})" for name in names)
        )
    for title, names in GROUPS.items():
        lines += ["", f"## {title}"]
        for name in names:
            value = getattr(HOMES.get(title, rankwise), name)
            write = write_class if inspect.isclass(value) else write_function
            lines += ["", f"### {name}", "", *write(name, value), "", _link_source(value)]
            while not lines[-1]:
                lines.pop()
    return "\n".join(lines).replace("``", "`") + "\n"


def main() -> None:
    """Write the page."""
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
