"""How a process ends with the one that started it, however that one went.

The parent keeps one end of a pipe and writes nothing: when it is gone, the pipe ends, and so does the child. On Linux
the kernel sees to it besides, for a process too busy to read a pipe. It is SIGKILL on purpose: a crash is what the
product is for, and nobody is left to wait for manners.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def bind_to(parent_pid: int, lifeline: int) -> None:
    """End this process when its parent has ended."""
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent_pid:  # it was gone before we asked
            _end()


def _follow(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: this returns when the last writer is gone
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
