"""What every process of a crew runs first: it binds itself to its parent, then runs the module it was asked for.

    python -P -m coatcheck.cli.processes.child PARENT LIFELINE LINK MODULE [ARGUMENT …]

PARENT is the process id of the parent, LIFELINE a pipe whose other end only the parent holds, LINK a socket to report
on, or `-`. The parent writes nothing to the lifeline: when the parent is gone, however it went, the pipe ends, and so
does the child. On Linux the kernel sees to it besides, for a process too busy to read a pipe. It is SIGKILL on purpose:
a crash is what the product is for, and no process is left that would wait for a drain.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import threading

CLI = "coatcheck.cli"
NO_LINK = "-"
ADDRESSES = "_COATCHECK_ADDRESSES"
"""The variable with options for the command line that other users must not see: arguments can be listed."""
PR_SET_PDEATHSIG = 1


def run(link: str, module: str, arguments: list[str]) -> None:
    """Run the command line with its link, or another module as `python -m` would."""
    if module != CLI:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    from coatcheck.cli.main import main

    arguments += json.loads(os.environ.pop(ADDRESSES, "[]"))
    if link == NO_LINK:
        main(arguments, prog_name="coatcheck")
    else:
        from coatcheck.cli.processes.reports import ReplicaEnd

        main(arguments, prog_name="coatcheck", obj=ReplicaEnd(int(link)))


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


if __name__ == "__main__":
    bind_to(int(sys.argv[1]), int(sys.argv[2]))
    run(sys.argv[3], sys.argv[4], sys.argv[5:])
