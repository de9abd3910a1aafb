"""What one task may store, in one commit and altogether. Over a limit, the task fails with the reason."""

from __future__ import annotations

from collections.abc import Sequence, Set

from coatcheck.errors import CheckpointRefused
from coatcheck.log import get_logger
from coatcheck.store.blobs import unpacked_size
from coatcheck.store.rows import CallId, Changes, Known, NewCall
from coatcheck.worker.settings import Settings

log = get_logger(__name__)


def check_history(gathered: int, known: Known, settings: Settings) -> None:
    """Raise CheckpointRefused if a run was given more than one task may have."""
    limit = settings.max_history
    if gathered > limit or known.is_withheld:
        raise CheckpointRefused(
            "history_too_large",
            f"its replies and step results are over the limit of {limit:,} bytes together; "
            "keep large values elsewhere and pass references, or raise COATCHECK_MAX_HISTORY",
        )


def check_size(changes: Changes, settings: Settings, open_calls: Set[CallId]) -> Sequence[CallId]:
    """Raise CheckpointRefused for what is over a limit, in bytes or in calls. Returns the calls it opens.

    They stay open until they are answered, or a time is over. A send is not waited for.
    """
    if not (changes.entries or changes.opens):
        return ()
    opened = [call.call_id for call in changes.opens if call.kind.is_awaited]
    size = sum([len(entry.value) for entry in changes.entries]) + sum([len(call.body) for call in changes.opens])
    for call in changes.opens:
        _check_body(call, settings)
    if size > settings.checkpoint_refuse:
        raise CheckpointRefused(
            "checkpoint_too_large",
            f"a commit of {size:,} bytes is over the limit of {settings.checkpoint_refuse:,}; keep large values "
            "elsewhere and pass references, or raise COATCHECK_CHECKPOINT_REFUSE",
        )
    if size > settings.checkpoint_warn:
        log.warning("checkpoint_large", size=size, warn_at=settings.checkpoint_warn)
    open_count = len(open_calls) + len(opened) - len(open_calls & set(changes.closes))
    if open_count > settings.max_fan_out:
        raise CheckpointRefused(
            "too_many_calls",
            f"{open_count:,} open calls are over the limit of {settings.max_fan_out:,}; "
            "work in portions, or raise COATCHECK_MAX_FAN_OUT",
        )
    return opened


def _check_body(call: NewCall, settings: Settings) -> None:
    # The size on the wire: a row may hold it compressed, many times smaller.
    if call.body and (raw := unpacked_size(call.body)) > settings.max_body:
        raise CheckpointRefused(
            "call_too_large",
            f"a call to {call.peer!r} of {raw:,} bytes is over the limit of {settings.max_body:,}; "
            "keep large values elsewhere and pass references, or raise COATCHECK_MAX_BODY",
        )
