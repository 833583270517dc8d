"""Work that gives way: in a thread of low CPU priority, and so are the threads that it starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

# A tenth of a processor that something else wants too. 19 or SCHED_IDLE would be a hundredth and less: too little for a
# least rate that was promised.
NICE: Final = 10

_Result = TypeVar("_Result")


def gently(call: Callable[[], _Result]) -> _Result:
    """What `call` gives or raises. The caller's own thread stays as it is: a priority cannot be raised again."""
    with ThreadPoolExecutor(1, thread_name_prefix="kvctl-gentle", initializer=_yield) as pool:
        return pool.submit(call).result()


def _yield() -> None:
    # Linux: 0 is the calling thread, and its children inherit
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
