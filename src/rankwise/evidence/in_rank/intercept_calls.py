"""Records the collectives that a rank's Python calls, as they begin and as they end; what C++ issues is the flight recorder's.

The methods of torch's class ``ProcessGroup`` are wrapped, as every call passes there, however the script has imported it. All of
it is for looking on: whatever goes wrong in here, the call goes on as if we were not there. This file stands
alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULE = "torch.distributed.distributed_c10d"
_MAKE, _LET_GO = "_new_process_group_helper", "_unregister_all_process_groups"
#: Called by init_process_group before ``_MAKE``, unless the script brings a store: it may wait already.
_MEET = "rendezvous"
#: How torch.distributed calls what ProcessGroup calls so, and which argument tells of the tensors that go in (of
#: scatter: come out).
_METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "barrier": ("barrier", None),
    "monitored_barrier": ("monitored_barrier", None),
    "send": ("isend", 0),
    "recv": ("irecv", 0),
    "recv_anysource": ("irecv", 0),
}
_MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
_REDUCING = {name for name in _METHODS if "reduce" in name}
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
#: Gloo's own counter, which the flight recorder shows, goes on by so many at a monitored barrier.
_MONITORED_TURNS = 2
_MOST_PENDING = 4096


class CollectiveRecorder:
    """The recording of this process; ``on_meet`` is called when a default process group is about to be made."""

    def __init__(self, module: Any, load: Callable[[str], Any], writer: Any, call_sites: Any, on_meet: Any) -> None:
        self._module, self._writer, self._call_sites, self._on_meet = module, writer, call_sites, on_meet
        self._ring, self._wrappers, self._split_sizes = load("ring"), load("replace_functions"), load("split_sizes")
        self.groups = groups = load("process_groups").Groups(module, self._ring, writer)
        self.is_on = True
        self._groups, self._known = groups, groups.known
        self._pending: dict[int, int] = {}
        self._tensor_specs = load("tensor_specs").TensorSpecs(self._ring)
        self._names = {name: writer.intern(spoken) for name, (spoken, _) in _METHODS.items()}
        self._blocking = {"send": writer.intern("send"), "recv": writer.intern("recv")}
        self._reduce_ops: dict[int, int] = {}
        self.stages = load("pipeline_stages").PipelineStages()

    def forget(self) -> None:
        """Record nothing more: in a forked child, which has a rank's memory and is none."""
        self.is_on = False
        self._pending.clear()

    # ----------------------------------------------------------------- wrap

    def wrap(self, group_class: Any, work_class: Any) -> None:
        """Put ourselves around the methods."""
        for name in _METHODS:
            raw = group_class.__dict__.get(name)
            if raw is not None:
                setattr(
                    group_class,
                    name,
                    self._wrappers.imitate(self._make_call(name, getattr(group_class, name)), name, raw),
                )
        raw_wait, raw_asks = work_class.wait, work_class.is_completed
        work_class.wait = self._wrappers.imitate(self._make_wait(raw_wait, raw_asks), "wait", raw_wait)
        work_class.is_completed = self._wrappers.imitate(self._make_is_completed(raw_asks), "is_completed", raw_asks)
        self._wrap_functions()
        self._wrappers.hide_from_compiler(
            self._enter, self._enter_exchange, self._settle, self._writer.leave, self._note_made, self._note_left,
            self._wrappers.leave_out_caller,
        )  # fmt: skip

    def _make_call(self, name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
        enter = self._enter_exchange if name in self._split_sizes.EXCHANGING else self._enter
        settle, get_frame, pending = self._settle, sys._getframe, self._pending
        leave_out = self._wrappers.leave_out_caller
        raised, is_plain = self._ring.RAISED, name not in _MESSAGES and name != "monitored_barrier"

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            entry = enter(name, self, args, kwargs, get_frame(1))
            try:
                work = raw(self, *args, **kwargs)
            except BaseException as error:
                settle(name, self, entry, None, raised)
                leave_out(error)
                raise
            if entry is None:
                return work
            if is_plain and work is not None and len(pending) < _MOST_PENDING:
                pending[id(work)] = entry[0]
            else:
                settle(name, self, entry, work, 0)
            return work

        return call

    def _make_wait(self, raw: Callable[..., Any], is_completed: Callable[..., Any]) -> Callable[..., Any]:
        pending, leave, get_time = self._pending, self._writer.leave, time.monotonic
        over, raised, leave_out = self._ring.OVER, self._ring.RAISED, self._wrappers.leave_out_caller

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = raw(self, *args, **kwargs)
            except BaseException as error:
                # A wait may have a bound of its own: the work goes on, and can be waited for again.
                number = pending.pop(id(self), None) if is_completed(self) else None
                if number is not None:
                    leave(number, get_time(), raised)
                leave_out(error)
                raise
            number = pending.pop(id(self), None)
            if number is not None:
                leave(number, get_time(), over)
            return result

        return wait

    def _make_is_completed(self, raw: Callable[..., Any]) -> Callable[..., Any]:
        pending, leave, get_time, over = self._pending, self._writer.leave, time.monotonic, self._ring.OVER
        leave_out = self._wrappers.leave_out_caller

        def is_completed(self: Any) -> Any:
            try:
                result = raw(self)
            except BaseException as error:
                leave_out(error)
                raise
            number = pending.pop(id(self), None) if result else None
            if number is not None:
                leave(number, get_time(), over)
            return result

        return is_completed

    def _wrap_functions(self) -> None:
        """See groups come and go. By their private names, as the public ones have been copied into other modules."""
        module = self._module
        do_first = self._wrappers.do_first
        do_first(module, _MEET, lambda _args: self._note_rendezvous())
        do_first(module, _LET_GO, lambda _args: self._note_left())
        make = getattr(module, _MAKE, None)
        if make is None:
            return

        @functools.wraps(make)
        def make_group(*args: Any, **kwargs: Any) -> Any:
            if len(args) > 2 and not args[2]:  # the default one
                self._note_rendezvous()
            try:
                made = make(*args, **kwargs)
            except BaseException as error:
                self._wrappers.leave_out_caller(error)
                raise
            self._note_made(made, args)
            return made

        setattr(module, _MAKE, make_group)

    # --------------------------------------------------------------- groups

    def _note_rendezvous(self) -> None:
        if not self.is_on:
            return
        try:
            self.stages.wrap()
            self._on_meet()
            self._writer.mark(self._ring.MEETS_AT)
        except Exception:
            return

    def _note_made(self, made: Any, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        try:
            self.stages.wrap()
            group = made[0] if isinstance(made, tuple) else made
            size, ranks = int(args[0]), tuple(args[2])
            if not ranks:  # the default one
                self._known.clear()
                self._writer.begin_world(time.monotonic())
            if hasattr(group, "group_name"):
                self._groups.add(group, ranks or tuple(range(size)))
        except Exception:
            return

    def _note_left(self) -> None:
        if self.is_on:
            self._known.clear()
            self._writer.mark(self._ring.LEFT_AT)

    # ---------------------------------------------------------------- calls

    def _enter(
        self, name: str, group: Any, args: Any, kwargs: Any, frame: Any, form: bytes | None = None
    ) -> tuple[Any, ...] | None:
        """Record that a call begins; ``form`` tells what its tensors are, if that is known already.

        Returns:
            The record's number, torch's sequence number before, who has told it, the number of the group's text, and of
            a message the key of its count; None if nothing is recorded.
        """
        if not self.is_on:
            return None
        try:
            known = self._known.get(id(group))
            if known is None or known.ref() is not group:
                known = self._groups.find(group)
            place = _METHODS[name][1]
            tensors = args[place] if place is not None and len(args) > place else None
            source, text = group, known.text
            if len(known.texts) > 1:
                source, text = self._find_backend(known, group, tensors, args, kwargs)
            before = source._get_sequence_number_for_group()
            site, inside, blocks, module = self._call_sites.find(frame)
            root = peer = self._ring.NOBODY
            flow = ""
            spoken, reduce_op, message = self._names[name], 0, None
            if name in _MESSAGES:
                kind = _MESSAGES[name]
                if blocks:
                    spoken = self._blocking[kind]
                there = args[1] if name != "recv_anysource" and len(args) > 1 else -1
                peer = known.members[there] if 0 <= there < len(known.members) else -1
                message = (kind, peer)
                seq = known.messages[message] = known.messages.get(message, 0) + 1
                flow = self.stages.find(tensors)
                module = self._call_sites.number(flow) if flow else module
            else:
                if name in _ROOTED or name in _REDUCING:
                    root, reduce_op = self._read_options(name, known, args, kwargs)
                seq = before + 1 + known.ahead[text]
            if form is None:
                form = b"" if tensors is None else self._tensor_specs.describe(tensors)
            texts = (spoken, text, site, inside, reduce_op, module)
            number = self._writer.enter(seq, time.monotonic(), texts, root, peer, form)
            if flow:
                self.stages.keep(number, flow)
        except Exception:
            return None
        return number, before, source, text, message

    def _enter_exchange(self, name: str, group: Any, args: Any, kwargs: Any, frame: Any) -> tuple[Any, ...] | None:
        """Record that a call begins in which each member may get as much as it likes from each other."""
        form = None
        try:
            known = self._known.get(id(group)) or self._groups.find(group)
            split_sizes = self._split_sizes.count_split_sizes(name, args, len(known.members)) if self.is_on else None
            if split_sizes is not None:
                form = self._tensor_specs.add_split_sizes(self._tensor_specs.describe(args[1]), known, split_sizes)
        except Exception:
            form = None
        return self._enter(name, group, args, kwargs, frame, form)

    def _settle(self, name: str, group: Any, entry: tuple[Any, ...] | None, work: Any, state: int) -> None:
        """Record what became of a call that has returned, or raised."""
        if entry is None:
            return
        try:
            number, before, source, text, message = entry
            known, leave = self._known[id(group)], self._writer.leave
            if name in _MESSAGES or name == "monitored_barrier":
                # Gloo counts each message in the same number, on the ranks that take part only.
                known.ahead[text] -= source._get_sequence_number_for_group() - before
            if name == "monitored_barrier":
                known.ahead[text] += _MONITORED_TURNS
                leave(number, time.monotonic(), state or self._ring.OVER)
            elif state:
                if source._get_sequence_number_for_group() == before:
                    state = self._ring.REFUSED
                    if message is not None:
                        known.messages[message] -= 1
                leave(number, time.monotonic(), state)
            elif work is not None:
                if len(self._pending) >= _MOST_PENDING:  # works that nobody waits for
                    self._pending.clear()
                self._pending[id(work)] = number
        except Exception:
            return

    def _read_options(self, name: str, known: Any, args: Any, kwargs: Any) -> tuple[int, int]:
        """Return the root as a global rank, and the number of the reduce op's name."""
        options = kwargs.get("opts") or (args[-1] if len(args) > 1 else None)
        root, reduce_op = self._ring.NOBODY, 0
        if options is None:
            return root, reduce_op
        if name in _ROOTED:
            there = getattr(options, "rootRank", options)
            if isinstance(there, int) and 0 <= there < len(known.members):
                root = known.members[there]
        if name in _REDUCING:
            how = getattr(options, "reduceOp", options)
            code = hash(how)
            reduce_op = self._reduce_ops.get(code, -1)
            if reduce_op < 0:
                word = str(how.op).rpartition(".")[2].lower() if hasattr(how, "op") else ""
                reduce_op = self._reduce_ops[code] = self._writer.intern(word)
        return root, reduce_op

    def _find_backend(self, known: Any, group: Any, tensors: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        """Return which backend of a group will do it, and the number of its text."""
        first = tensors
        while isinstance(first, list | tuple) and first:
            first = first[0]
        options = kwargs.get("opts") or (args[-1] if args else None)
        device = getattr(first, "device", None) or getattr(options, "device", None)
        if device is None or device.type not in known.texts:
            return group, known.text
        return group._get_backend(device), known.texts[device.type]
