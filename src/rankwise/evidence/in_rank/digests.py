"""Checksums of models that are trained as replicas, in a rank: taken at steps fixed in advance, so that the parent can compare the ranks.

Watched are models in DistributedDataParallel, and a model that is in no wrapper while a DistributedSampler deals out its data. Which steps
are digested depends on their number alone, never on time: all ranks take the same. This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from importlib import import_module
from typing import Any

_MODULE, _LET_GO = "torch.distributed.distributed_c10d", "_unregister_all_process_groups"
#: Steps up to here are digested at 1, 4, 16, 64, 256; later ones at each multiple of it. The step after each is
#: digested too.
_EVERY = 512
#: The part of the time that digests may take, once there have been a few.
_MOST_SHARE, _FREE_UNTIL = 0.002, 17
_MOST_OPTIMIZERS, _MOST_TENSORS = 16, 2048
#: So long a GPU is waited for at the end, when nothing else will pick its numbers up.
_LAST_WAIT_S = 0.5
#: Ways to send gradients after which all ranks hold the same: torch's compressing hooks, and ours.
_COMPRESSING = ("torch.distributed.algorithms.ddp_comm_hooks.", "rankwise.parallel.ddp")
_OTHERWISE = ("post_localSGD_hooks", "debugging_hooks", "ddp_zero_hook")
#: Libraries that carry gradients by ways of their own.
_CARRIERS = ("horovod", "deepspeed", "colossalai", "bagua", "byteps", "hivemind", "torchft")


class _Model:
    """A model in DistributedDataParallel.

    Attributes:
        ref: The wrapper.
        members: Of its group, as global ranks.
        number: Which of these members' wrappers it is.
        site: The user's line that made it.
        taken: What the wrapper knew when it was made: by name the parameter, whether it was trained, its device and
            type.
    """

    __slots__ = ("members", "num_optimizers", "number", "ref", "site", "taken")

    def __init__(self, ddp: Any, members: tuple[int, ...], number: int, site: str) -> None:
        self.ref, self.members, self.number, self.site = weakref.ref(ddp), members, number, site
        self.num_optimizers = 0
        self.taken = {
            name: (weakref.ref(one), one.requires_grad, one.device, one.dtype)
            for name, one in ddp.module.named_parameters()
        }


class _Watched:
    """An optimizer, and how many steps it has made."""

    __slots__ = ("due", "is_paired", "numbers", "ref", "steps")

    def __init__(self, optimizer: Any) -> None:
        self.ref = weakref.ref(optimizer)
        self.steps, self.due, self.is_paired = 0, 1, False
        self.numbers: dict[Any, int] = {}


class Digests:
    """The digests of this process.

    Attributes:
        spent_s: What they have cost so far.
    """

    def __init__(self, load: Any, ring: Any, writer: Any, find_site: Any, groups: Any) -> None:
        self._checksums, self._wrappers, logs = load("checksums"), load("replace_functions"), load("digest_log")
        self._find_site, self._groups = find_site, groups
        self._is_on = os.environ.get("RANKWISE_DIGESTS") != "0"
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._models: list[_Model] = []
        self._num_wrapped: dict[tuple[int, ...], int] = {}
        self._watched: dict[int, _Watched] = {}
        self._logs, self._add, self._make_source = logs.DigestLog(ring, writer), logs.add, logs.Source
        self._unsynced: set[int] = set()
        self._pending: list[tuple[Any, Any, dict[str, Any]]] = []
        self._sources: dict[int, Any] = {}
        self._num_digests, self._has_ended = 0, False
        self._has_wrapped = self._has_sampler = self._has_begun = False
        self._num_plain = 0
        self._begun_s = self.spent_s = 0.0
        self._parameter_class: Any = None

    def begin(self) -> None:
        """Begin to watch for wrappers and steps; once."""
        if self._has_begun or not self._is_on:
            return
        self._has_begun = True
        self._parameter_class = import_module("torch.nn.parameter").Parameter
        compiler: Any = import_module("torch.compiler")
        optimizer: Any = import_module("torch.optim.optimizer")
        wrapper = import_module("torch.nn.parallel.distributed").DistributedDataParallel
        sampler = import_module("torch.utils.data.distributed").DistributedSampler
        wrappers = self._wrappers
        # Not the constructor: what it warns of is told at the line of the user's that called it, frame by frame.
        if (build := getattr(wrapper, "_ddp_init_helper", None)) is not None:
            wrapper._ddp_init_helper = wrappers.note_after(build, self._note_wrapped)
        sampler.__init__ = wrappers.note_after(sampler.__init__, self._note_sampler)
        wrapper.no_sync = wrappers.note_before(wrapper.no_sync, self._unsynced.add, compiler.is_compiling)
        wrappers.hide_from_compiler(self._before_step, self._step)
        before, after = wrappers.make_step_hooks(self._before_step, self._step, compiler.is_compiling)
        optimizer.register_optimizer_step_pre_hook(before)
        optimizer.register_optimizer_step_post_hook(after)
        # The groups' collectives can still be counted then; at exit they may be gone.
        wrappers.do_first(import_module(_MODULE), _LET_GO, lambda _args: self._end())
        atexit.register(self._leave)

    def forget(self) -> None:
        """In a forked child: digest nothing."""
        self._is_on = False

    # -------------------------------------------------------------- what is noted

    def _note_wrapped(self, ddp: Any, frame: Any) -> None:
        self._has_wrapped = True
        group = ddp.process_group
        members = self._find(group).members
        if self._is_on and len(members) > 1:
            number = self._num_wrapped.get(members, 0)
            self._num_wrapped[members] = number + 1
            self._models.append(_Model(ddp, members, number, self._find_site(frame)))

    def _note_sampler(self, sampler: Any, _frame: Any) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        if distributed.is_initialized() and sampler.num_replicas == distributed.get_world_size() > 1:
            self._has_sampler = True

    def _find(self, group: Any) -> Any:
        known = self._groups.known.get(id(group))
        return known if known is not None and known.ref() is group else self._groups.find(group)

    def _before_step(self, optimizer: Any) -> None:
        """Before a step: what an optimizer has not changed yet is digested as well."""
        known = self._watched.get(id(optimizer))
        if not self._is_on or (known is not None and known.ref() is optimizer):
            return
        self._watched = {key: one for key, one in self._watched.items() if one.ref() is not None}
        if len(self._watched) < _MOST_OPTIMIZERS:
            self._watched[id(optimizer)] = watched = _Watched(optimizer)
            self._begun_s = self._begun_s or time.monotonic()
            self._digest(optimizer, watched)

    def _step(self, optimizer: Any) -> None:
        """After a step."""
        known = self._watched.get(id(optimizer))
        if known is None or known.ref() is not optimizer or not self._is_on:
            return
        known.steps += 1
        self._has_ended = False
        if known.steps >= known.due:
            if known.is_paired or self._is_affordable(known.steps):
                self._digest(optimizer, known)
            known.due, known.is_paired = _find_next(known.steps)
        elif self._pending:
            self._collect()

    def _is_affordable(self, steps: int) -> bool:
        return steps <= _FREE_UNTIL or self.spent_s <= _MOST_SHARE * (time.monotonic() - self._begun_s)

    # -------------------------------------------------------------------- digests

    def _digest(self, optimizer: Any, watched: _Watched) -> None:
        if os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return
        begin_s = time.monotonic()
        try:
            if not _is_elsewhere():
                ids = {id(one) for group in optimizer.param_groups for one in group["params"]}
                self._models = [model for model in self._models if model.ref() is not None]
                with _get_torch()._C.DisableTorchFunction():
                    for model in self._models:
                        self._digest_model(model, optimizer, watched, ids)
                    if self._has_sampler and not self._has_wrapped:
                        self._digest_plain(optimizer, watched)
        except Exception:  # not torch as we know it: the user's job matters more
            self._is_on = False
        finally:
            self.spent_s += time.monotonic() - begin_s
            self._lock.release()
        self._collect()

    def _digest_model(self, model: _Model, optimizer: Any, watched: _Watched, ids: set[int]) -> None:
        ddp = model.ref()
        if ddp is None:
            return
        ignored = ddp.parameters_to_ignore
        chosen = [
            (name, one)
            for name, one in ddp.module.named_parameters()
            if id(one) in ids and name not in ignored and self._is_plain(one)
        ][:_MOST_TENSORS]
        if not chosen:
            return
        key = model.members, model.number
        number = watched.numbers.get(key)
        if number is None:
            number = watched.numbers[key] = model.num_optimizers
            model.num_optimizers += 1
        text = {
            "kind": "ddp", "members": model.members, "model": model.number, "optimizer": number, "site": model.site,
            "states": "".join(_find_state(model.taken.get(name), one) for name, one in chosen),
            "is_hooked": any(_is_unknown(hook) for hook, _ in ddp._comm_hooks),
        }  # fmt: skip
        # The flags alone don't tell no_sync from no_grad.
        is_synced = ddp.require_forward_param_sync and ddp.require_backward_grad_sync
        moment = {"forwarded": bool(ddp._lazy_init_ran), "synced": is_synced or id(ddp) not in self._unsynced}
        self._unsynced.discard(id(ddp))
        self._begin_reading(text, moment, chosen, ddp.process_group, optimizer, watched, model)

    def _digest_plain(self, optimizer: Any, watched: _Watched) -> None:
        """Digest a model of which nothing is known but its optimizer, if nothing else could carry its gradients."""
        distributed: Any = sys.modules["torch.distributed"]
        if any(name in sys.modules for name in _CARRIERS) or not distributed.is_initialized():
            return
        rpc = sys.modules.get("torch.distributed.rpc")
        groups = optimizer.param_groups
        named = [
            ((group.get("param_names") or {number: f"parameter {number} of group {place}"})[number], one)
            for place, group in enumerate(groups)
            for number, one in enumerate(group["params"])
        ][:_MOST_TENSORS]
        if not named or not all(self._is_plain(one) for _, one in named):
            return
        if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", bool)():
            return
        number = watched.numbers.setdefault(None, self._num_plain)
        self._num_plain = max(self._num_plain, number + 1)
        body = {
            "kind": "plain", "members": tuple(range(distributed.get_world_size())), "model": 0, "optimizer": number, "site": "",
            "states": "", "is_hooked": False,
        }  # fmt: skip
        moment = {"forwarded": False, "synced": False}
        self._begin_reading(body, moment, named, distributed.group.WORLD, optimizer, watched)

    def _is_plain(self, one: Any) -> bool:
        """Whether it is a whole parameter, and no part of one, nor one that only looks like one."""
        return type(one) is self._parameter_class and self._checksums.is_readable(one)

    def _begin_reading(
        self,
        body: dict[str, Any],
        moment: dict[str, Any],
        chosen: list[Any],
        group: Any,
        optimizer: Any,
        watched: _Watched,
        model: _Model | None = None,
    ) -> None:
        names, tensors = [name for name, _ in chosen], [one for _, one in chosen]
        rates = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float | int)]
        moment |= {"step": watched.steps, "seq": self._read_seq(group, tensors[0].device), "rates": rates}
        moment["order"] = self._num_digests = self._num_digests + 1
        body["kinds"] = "".join(map(self._checksums.find_kind, tensors))
        sizes = [one.numel() for one in tensors]
        body |= {"largest": max(sizes), "elements": sum(sizes)}
        body["machine"] = self._checksums.describe_machine(tensors[0].device)
        # Both of a pair read the same parts.
        pending = self._checksums.read(tensors, watched.steps - watched.is_paired)
        log = self._logs.find(body, names, tensors)
        self._pending.append((pending, log, moment))
        self._sources.pop(id(log), None)
        self._sources[id(log)] = self._make_source(log, chosen, model and model.ref, group, watched)
        if len(self._sources) > _MOST_OPTIMIZERS:
            del self._sources[next(iter(self._sources))]

    def _read_seq(self, group: Any, device: Any) -> int:
        """Return how many collectives the group has made: equal where ranks are at the same place of their program."""
        known = self._find(group)
        source, text = group, known.text
        if len(known.texts) > 1 and device.type in known.texts:
            source, text = group._get_backend(device), known.texts[device.type]
        return int(source._get_sequence_number_for_group()) + int(known.ahead[text])

    # --------------------------------------------------------------------- report

    def _collect(self) -> None:
        """Write down the digests that are there."""
        # While a graph is captured a GPU must not even be asked whether it is ready: the capture would fail.
        if not self._pending or _is_capturing() or not self._lock.acquire(blocking=False):
            return
        begin_s = time.monotonic()
        try:
            done = 0
            for pending, log, moment in self._pending:
                if not pending.is_complete():
                    break
                done += 1
                self._add(log, moment, *pending.pack())
            del self._pending[:done]
            if done:
                self._logs.write(time.monotonic())
        except Exception:
            self._is_on, self._pending = False, []
        finally:
            self.spent_s += time.monotonic() - begin_s
            self._lock.release()

    def _leave(self) -> None:
        """At exit; if the groups are gone by then, the end was told, and what ranks do afterwards is their own."""
        if sys.modules["torch.distributed"].is_initialized():
            self._end()

    def _end(self) -> None:
        """Digest all models once more: what counts is what the job has come to."""
        if os.getpid() != self._pid or not self._is_on:
            return
        self._collect()
        if self._has_ended or _is_raising():
            return
        self._has_ended = True
        if self._lock.acquire(blocking=False):
            try:
                if not _is_elsewhere():
                    with _get_torch()._C.DisableTorchFunction():
                        for source in self._sources.values():
                            self._digest_last(source)
            except Exception:  # as in _digest
                self._is_on = False
                return
            finally:
                self._lock.release()
        end_s = time.monotonic() + _LAST_WAIT_S
        self._collect()
        while self._pending and time.monotonic() < end_s:
            time.sleep(0.001)
            self._collect()

    def _digest_last(self, source: Any) -> None:
        tensors, group = source.find(), source.group()
        digests = source.log["digests"]
        if not tensors or group is None or not digests or not all(map(self._is_plain, tensors)):
            return
        moment = {name: digests[-1][name] for name in ("forwarded", "synced", "rates")}
        seq = self._read_seq(group, tensors[0].device)
        moment |= {"step": source.watched.steps, "seq": seq, "is_last": True}
        moment["order"] = self._num_digests = self._num_digests + 1
        self._pending.append((self._checksums.read(tensors, source.watched.steps), source.log, moment))


def _find_next(steps: int) -> tuple[int, bool]:
    """Return which step is digested next, and whether it is the second of a pair."""
    if steps >= _EVERY:
        return (steps + 1, True) if steps % _EVERY == 0 else ((steps // _EVERY + 1) * _EVERY, False)
    first = 1
    while first * 4 <= steps:
        first *= 4
    if steps == first:
        return steps + 1, True
    return min(first * 4, _EVERY), False


def _find_state(taken: Any, one: Any) -> str:
    """Return a letter for what a wrapper knows of a parameter: known, added later, unfrozen later, or moved later."""
    if taken is None or taken[0]() is not one:
        return "a"
    if not taken[1]:
        return "u"
    return "k" if taken[2:] == (one.device, one.dtype) else "m"


def _is_unknown(hook: Any) -> bool:
    """Whether nobody knows that gradients are the same on all ranks after a hook."""
    module = str(getattr(hook, "__module__", ""))
    return not module.startswith(_COMPRESSING) or module.endswith(_OTHERWISE)


def _is_raising() -> bool:
    """Whether the script is on its way out by an exception, which has left its ranks wherever it was."""
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def _get_torch() -> Any:
    return sys.modules["torch"]


def _is_elsewhere() -> bool:
    """Whether operations do not do now what they say: a GPU records them for later, or some mode takes them."""
    return bool(_get_torch()._C._len_torch_dispatch_stack()) or _is_capturing()


def _is_capturing() -> bool:
    """Whether this thread's stream records a CUDA graph."""
    cuda = _get_torch().cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())
