"""Which parts of asyncio the engine knows by their inside, and whether the running Python still has them.

What `ctx` offers, awaited in the handler itself, depends on none of this.
"""

from __future__ import annotations

import asyncio

from coatcheck.worker.engine import classify

__all__ = ["find_unsupported"]


def find_unsupported() -> tuple[str, ...]:
    """Name what works less well on this Python, and what happens instead. Empty on every version we test."""
    enter = asyncio.Timeout.__aenter__.__code__
    checks = {
        "asyncio.gather: a run that waits in one stays in RAM": classify.GATHERING is not None,
        "asyncio.wait: a run that waits in one stays in RAM": (
            classify.WAIT is not None and {"fs", "timeout"} <= set(classify.WAIT.co_varnames)
        ),
        "asyncio.TaskGroup: a run that waits in one stays in RAM": bool(classify.GROUP_EXITS),
        "asyncio.as_completed: a run that waits in one stays in RAM": bool(classify.AS_COMPLETED),
        "asyncio.shield: a run that waits in one stays in RAM": (
            classify.SHIELD_DONE is not None and "inner" in classify.SHIELD_DONE.co_freevars
        ),
        "asyncio.timeout: it is not recorded, so it starts anew at every resume": (
            {"cancelling", "reschedule"} <= set(enter.co_names) and hasattr(asyncio.Timeout, "_on_timeout")
        ),
        "asyncio.sleep: long ones are not warned of": classify.SLEEP is not None,
        "asyncio.Lock and its family: a run that waits for one stays in RAM": len(classify.LOCKS) >= 7,
    }
    return tuple(text for text, is_fine in checks.items() if not is_fine)
