"""Who asks: from a request's token to a caller, by the app's own hook. The token goes no further than that hook.

A caller is kept with its task, so that any replica knows it after a resume, when the token has long expired.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from coatcheck.broker.bodies import Limits
from coatcheck.broker.port import Message
from coatcheck.broker.wire import find_token
from coatcheck.errors import MalformedMessage, TransientError, Unauthorized, UsageError
from coatcheck.log import get_logger
from coatcheck.store.rows import Caller

log = get_logger(__name__)

Identify: TypeAlias = Callable[[str | None], Caller | Awaitable[Caller | None] | None]

LONGEST_SUBJECT = 255
LARGEST_CLAIMS = 16 * 1024


async def find_caller(identify: Identify | None, message: Message, limits: Limits) -> Caller | None:
    """Ask the app's hook who sent a request. Without a hook no caller is known, and the token is not even read.

    Raises Unauthorized if the hook does not accept the caller, TransientError if it says that it cannot tell now.
    """
    if identify is None:
        return None
    try:
        token = find_token(message, limits)
    except MalformedMessage as error:
        raise Unauthorized(error.detail) from None
    try:
        answer = identify(token)
        return _checked(await answer if inspect.isawaitable(answer) else answer)
    except (Unauthorized, TransientError):
        raise
    except Exception as error:  # noqa: BLE001 - user code: if it raises, the caller is not accepted
        # Its name only: the text may quote the token, and goes to logs and to the requester.
        name = type(error).__name__
        if isinstance(error, UsageError):
            log.error("identify_unusable", detail=str(error))  # ours: it quotes nothing
        else:
            log.warning("identify_failed", exception=name)
    raise Unauthorized(f"the caller was not accepted ({name})")


def digest_with(digest: bytes, caller: Caller | None) -> bytes:
    """Tell the same body of two callers apart: what one asked for is not answered to the other.

    By subject alone, for claims such as a token's expiry differ from one request to the next.
    """
    if caller is None:
        return digest
    return hashlib.sha256(digest + b"\0caller\0" + caller.subject.encode("utf-8", "surrogatepass")).digest()


def _checked(caller: object) -> Caller | None:
    """Raise UsageError for what a row cannot hold; its text quotes nothing."""
    if caller is None:
        return None
    if not isinstance(caller, Caller):
        raise UsageError(f"identify returned a {type(caller).__name__}; it must return a Caller or None")
    given: object = caller.subject  # typed, but by users
    if not isinstance(given, str) or not 1 <= len(given) <= LONGEST_SUBJECT:
        raise UsageError(f"a caller's subject must be a text of 1 to {LONGEST_SUBJECT} characters")
    try:
        subject, claims = given.encode(), msgspec.json.encode(dict(caller.claims))
    except (TypeError, ValueError, RecursionError, OverflowError):
        raise UsageError("a caller's claims must be an object that JSON can hold") from None
    if len(claims) > LARGEST_CLAIMS:
        raise UsageError(f"a caller's claims take {len(claims):,} bytes; the limit is {LARGEST_CLAIMS:,}")
    if b"\0" in subject or b"\\u0000" in claims:
        raise UsageError("a caller's subject and claims must not contain a NUL: Postgres refuses it")
    return Caller(given, msgspec.json.decode(claims))  # as any replica will read it from the row
