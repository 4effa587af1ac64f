"""What a rank keeps of a model that is cut into stages: its own stages' parts, under the names of the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from rankwise.base.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.parallel.pipeline_layout import Deal, Layout


class Kept(nn.Module):  # type: ignore[misc]
    """Stands in a pruned model for a part that other ranks have; holds the parameters of it that this rank needs as well."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Never called: the stages are."""
        raise ModelError("a part of the model that another stage has was called", hint="pipe.step(batch), or pipe(inputs) in evaluation")  # fmt: skip


def prune(model: nn.Module, layout: Layout, deal: Deal, own: Sequence[int]) -> None:
    """Drop from a model, in place, what none of this rank's stages has; the names of what stays are kept.

    Args:
        model: The whole.
        layout: Its parts.
        deal: Which of them each stage has.
        own: This rank's stages.
    """
    stages = set(own)
    kept = {name for name, holders in deal.holders.items() if not stages.isdisjoint(holders)}
    parts = [model.get_submodule(name) for name in layout.units if not stages.isdisjoint(deal.homes[name])]
    called = {id(one) for part in parts for one in part.parameters()}
    for name in layout.owners:
        module = model.get_submodule(name)
        module._parameters = {one: held for one, held in module._parameters.items() if f"{name}.{one}".removeprefix(".") in kept or held is None}  # fmt: skip
    for name in layout.units:
        if stages.isdisjoint(deal.homes[name]):
            part = model.get_submodule(name)
            parent, _, last = name.rpartition(".")
            made = _keep(name, part, kept, called)
            model.get_submodule(parent)._modules[last] = made


def _keep(name: str, part: nn.Module, kept: set[str], called: set[int]) -> nn.Module:
    """Return the parameters of a part that are kept, under their names; not those that a part of this rank has as well."""
    made = Kept()
    names: Mapping[str, Any] = dict(part.named_parameters(remove_duplicate=False))
    for own, one in names.items():
        if f"{name}.{own}" in kept and id(one) not in called:
            *path, last = own.split(".")
            module: nn.Module = made
            for step in path:
                module._modules.setdefault(step, nn.Module())
                module = module._modules[step]
            module.register_parameter(last, one)
    return made
