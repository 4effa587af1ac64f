"""Lightning monitors a metric that each rank logs for itself.

**Why it breaks.** `self.log("val_loss", loss)` in a validation step keeps the mean over this rank's batches. A
checkpoint or an early stop then monitors the number of one rank: the best model is chosen by a part of the validation
set.

Bad:

```python
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class Net(L.LightningModule):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.compute_loss(batch))


trainer = L.Trainer(devices=4, strategy="ddp", callbacks=[ModelCheckpoint(monitor="val_loss")])
trainer.fit(Net())
```

Good:

```python
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class Net(L.LightningModule):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.compute_loss(batch), sync_dist=True)


trainer = L.Trainer(devices=4, strategy="ddp", callbacks=[ModelCheckpoint(monitor="val_loss")])
trainer.fit(Net())
```

**When it says nothing.** A torchmetrics object is logged, which reduces itself; one device; the metric is not
monitored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.values import Object
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_LOG = "lightning.pytorch.LightningModule.log"
_WATCHERS = ("ModelCheckpoint", "EarlyStopping")
_PLACES = frozenset({"validation_step", "test_step", "on_validation_epoch_end", "on_validation_batch_end"})


def check(script: Script) -> Iterator[Finding]:
    """Metrics of an evaluation that a callback monitors and no rank reduces."""
    watched = {
        value.const
        for call in script.all_calls
        if call.name.endswith(_WATCHERS) and (value := call.arg(None, "monitor")) is not None
    }
    if not watched or _is_one_device(script):
        return
    for call in script.calls_of(_LOG):
        name, value = call.arg(0, "name"), call.arg(1, "value")
        sync = call.arg(None, "sync_dist")
        is_metric = (
            value is not None
            and isinstance(value.thing, Object)
            and value.thing.kind.startswith("torchmetrics")
        )
        if (
            name is None
            or name.const not in watched
            or is_metric
            or (sync is not None and sync.const is not False)
        ):
            continue
        if call.function is not None and call.function.name in _PLACES:
            yield script.finding(
                RULE,
                call.node,
                f"{name.const!r} is the mean over this rank's batches, and a callback monitors it",
                "log it with sync_dist=True",
            )


def _is_one_device(script: Script) -> bool:
    trainers: list[Call] = [call for call in script.all_calls if call.name == "lightning.pytorch.Trainer"]
    devices = [call.arg(None, "devices") for call in trainers]
    return bool(devices) and all(one is not None and one.const in {1, "1"} for one in devices)


RULE: Rule[Script] = Rule(
    id="RW617",
    name="monitored-without-sync",
    severity="warning",
    classes=("M6", "M1"),
    summary="Lightning monitors a metric that each rank logs for itself",
    check=check,
)
