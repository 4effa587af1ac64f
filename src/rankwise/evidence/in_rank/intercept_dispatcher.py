"""Records collectives that C++ issues, as DDP's buckets, at the moment when torch dispatches them: only where RANKWISE_WATCH=dispatcher asks for it.

The flight recorder has the same at next to no cost, but only while it is switched on and the rank can be asked. What is
recorded here can be read of a rank that is frozen, or was killed. A function of ours then lies below every collective, and a small
step takes some percent longer. This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import functools
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: The first kernels that torch asks, whatever the tensors are: each of them passes the call on.
_KEY = "BackendSelect"


class DispatcherHook:
    """The recording at torch's dispatcher, for this process."""

    def __init__(
        self,
        module: Any,
        load: Callable[[str], Any],
        ring: Any,
        writer: Any,
        call_sites: Any,
        recorder_of_calls: Any,
    ) -> None:
        self._module, self._load, self._ring, self._writer = module, load, ring, writer
        self._call_sites, self._recorder_of_calls = call_sites, recorder_of_calls
        self._has_begun = False
        # Kernels are taken back when this is dropped.
        self._library: Any = None

    def begin(self) -> None:
        """Put ourselves below all collectives; once."""
        if self._has_begun:
            return
        self._has_begun = True
        try:
            self._begin()
        except Exception as error:  # not torch as we know it
            sys.stderr.write(f"rankwise: what C++ issues is not recorded at the dispatcher: {error!r}\n")

    def _begin(self) -> None:
        torch: Any = sys.modules["torch"]
        after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
        library = import_module("torch.library").Library("c10d", "IMPL")
        wrappers, split_sizes = self._load("replace_functions"), self._load("split_sizes")
        for name, (spoken, place) in self._recorder_of_calls.methods.items():
            # Some have one name for Python and another one for the dispatcher, which is in the list as well.
            for operator in (f"{name}_", name):
                if not name.startswith("monitored") and hasattr(torch.ops.c10d, operator):
                    overload = getattr(torch.ops.c10d, operator).default
                    kernel = self._make_kernel(overload, name, self._writer.intern(spoken), place, after, split_sizes)
                    wrappers.hide_from_compiler(kernel)
                    library.impl(operator, kernel, _KEY, with_keyset=True)
                    break
        self._library = library

    def _make_kernel(
        self, overload: Any, name: str, spoken: int, place: int | None, after: Any, split_sizes: Any
    ) -> Callable[..., Any]:
        names = [argument.name for argument in overload._schema.arguments]
        group_at = names.index("process_group")
        root_at = names.index("root_rank") if "root_rank" in names else None
        cuts_at = [names.index(part) for part in ("output_split_sizes", "input_split_sizes") if part in names]
        # What `redispatch` calls, without a frame of its own in the user's tracebacks.
        redispatch = overload._handle.redispatch_boxed
        unbox, get_frame = self._module.ProcessGroup.unbox, sys._getframe
        recorder_of_calls, call_sites, settle = self._recorder_of_calls, self._call_sites, self._settle
        leave_out = self._load("replace_functions").leave_out_caller
        is_exchange = name in split_sizes.EXCHANGING

        def issue(keyset: Any, *args: Any) -> Any:
            entry = None
            try:
                frame = get_frame(1)
            except ValueError:  # a thread of C++'s own
                frame = None
            # What Python has called is recorded already, with more than is known here.
            if recorder_of_calls.is_on and (frame is None or not call_sites.is_ours(frame)):
                try:
                    counted = functools.partial(
                        split_sizes.count_split_sizes, name, (args[0], args[1], *(args[at] for at in cuts_at))
                    ) if is_exchange else None  # fmt: skip
                    entry = recorder_of_calls.enter_native(
                        spoken, unbox(args[group_at]), None if place is None else args[place],
                        -1 if root_at is None else args[root_at], counted, frame,
                    )  # fmt: skip
                except Exception:
                    entry = None
            try:
                return redispatch(keyset & after, *args)
            except BaseException as error:
                if entry is not None:
                    settle(*entry)
                leave_out(error)
                raise

        return issue

    def _settle(self, number: int, source: Any, before: int) -> None:
        """Record that a collective was not issued after all, or has raised."""
        has_begun = source._get_sequence_number_for_group() != before
        state = self._ring.RAISED if has_begun else self._ring.REFUSED
        self._writer.leave(number, time.monotonic(), state | self._ring.NATIVE)
