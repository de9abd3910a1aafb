"""Named points of the protocol at which a process can be made to die or to freeze, to show that nothing is lost.

`COATCHECK_CRASH=after_park:3` ends the process, as `kill -9` would, the third time it has put a task down.
`after_park:3:stop` freezes it there with SIGSTOP instead. Several are separated by commas. Outside of such trials all
points are off, and a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

from coatcheck.errors import InvalidSettings

VARIABLE = "COATCHECK_CRASH"
EXIT_CODE = 137

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "request_received": "a request was delivered, nothing is done",
        "before_accept": "the rows are about to be asked about a request",
        "after_accept": "a request's row was made or found",
        "reply_received": "a reply, timeout or resume was delivered, nothing is done",
        "before_claim": "a reply is about to be claimed",
        "after_claim": "a claim is committed",
        "before_resume": "a resume is about to be asked for",
        "after_resume": "a resume is committed",
        "before_resend": "a task has something not known to be sent",
        "after_resend": "it was sent again, and nothing says so yet",
        "before_run": "a task was granted, its handler is about to run",
        "before_first_row": "a handler wants its first step, and there is no row",
        "after_first_row": "the row is written, the first step is about to run",
        "before_step": "a step is about to run",
        "after_step": "a step has run, nothing says so",
        "before_record": "results of steps or new calls are about to be committed by a run that goes on",
        "after_record": "they are committed",
        "before_detach": "a long run is about to live by its lease alone",
        "after_detach": "it does, and its trigger is not acked yet",
        "before_park": "a task is about to be put down",
        "after_park": "it is put down, its calls have not left",
        "before_finish": "an end is about to be committed",
        "after_finish": "the end is committed, nobody was told",
        "before_retry": "a retry is about to be committed",
        "after_retry": "it is committed",
        "before_hold": "a task that this code cannot run is about to be held",
        "after_hold": "it is held",
        "before_calls": "committed calls are about to be published",
        "after_calls": "calls are published, nothing says so",
        "before_publish": "a batch is about to be handed to the broker",
        "message_confirmed": "the broker confirmed one message, perhaps not yet its neighbours",
        "after_publish": "a whole batch is confirmed",
        "before_answer": "a final reply is about to be published",
        "after_answer": "the final reply is confirmed",
        "before_leave": "a final reply that a queue refused is about to be left to the sweeper",
        "after_leave": "it is left to the sweeper, and its trigger not acked yet",
        "before_ack": "all is done for a trigger but its ack",
        "after_ack": "the ack is given, and perhaps not written yet",
        "acks_written": "acks were written to the broker",
        "before_commit": "a transaction is about to be committed",
        "after_commit": "a transaction is committed, its caller has not heard",
        "before_mark": "calls known to be sent are about to be marked",
        "after_mark": "they are marked",
        "before_renew": "leases are about to be renewed",
        "after_renew": "leases are renewed",
        "order_received": "a cancel was delivered",
        "after_cancel": "a cancel is committed, nobody was told",
        "after_cancel_told": "a cancel was told to peers and the requester, not to other replicas",
        "before_order": "a rewind, fork, retry, pause or resume is decided, nothing is written",
        "after_order": "it is committed, no peer and no sweeper has heard of it",
        "before_bury": "a bad message is about to go to the dead letters",
        "after_bury": "it is there, and on its queue too",
        "sweep_looked": "a sweeper has taken what is due and put it off, nothing is emitted",
        "sweep_emitted": "timeouts and resumes are out",
        "sweep_resent": "unsent calls or replies were sent, nothing says so",
        "sweep_repaired": "a sweeper has kept house",
        "before_seal": "a seal is signed, and about to be inserted",
        "after_seal": "a seal is in its row, and in no sink",
        "after_sink": "seals are written to a sink, and nothing says so",
    }
)

_on_reach: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Say that the protocol has reached this point. If the point is armed, the process may end here."""
    if _on_reach is not None:
        _on_reach(point)


def arm(on_reach: Callable[[str], None] | None) -> None:
    """Report every point to a function; None: no more."""
    global _on_reach  # noqa: PLW0603 - a local name is what makes a point that is off cost nothing
    _on_reach = on_reach


def arm_from_environment() -> None:
    """Do what the variable says, if it is set. Raises InvalidSettings for a point that does not exist."""
    wanted = os.environ.get(VARIABLE)
    if wanted:
        arm(Crashes(wanted))


class Crashes:
    """Ends or freezes this process at chosen points, once each."""

    def __init__(self, wanted: str) -> None:
        self._plan = dict(_parse(one.strip()) for one in wanted.split(",") if one.strip())
        self._counts: Counter[str] = Counter()

    def __call__(self, point: str) -> None:
        if point not in self._plan:
            return
        self._counts[point] += 1
        at, stops = self._plan[point]
        if self._counts[point] == at:
            os.write(
                2, f"{VARIABLE}: {'stopped' if stops else 'ended'} at {point}\n".encode()
            )  # the last word there is
            if stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                os._exit(EXIT_CODE)


def _parse(text: str) -> tuple[str, tuple[int, bool]]:
    point, *rest = text.split(":")
    if point not in POINTS:
        raise InvalidSettings(f"{VARIABLE}: there is no point {point!r}; there are {', '.join(POINTS)}")
    how = rest[1] if len(rest) > 1 else "exit"
    count = rest[0] if rest else "1"
    if not count.isdecimal() or int(count) < 1 or how not in ("exit", "stop") or len(rest) > 2:
        raise InvalidSettings(f"{VARIABLE}: {text!r} is not point, point:count or point:count:stop; counts begin at 1")
    return point, (int(count), how == "stop")
