"""Where seals are written to beside the database: places that a writer of the database cannot change.

Each takes one document, and is sure to have it when it returns. The same seal may come twice, after a crash or from two
sweepers; that is the same line once more, and no harm.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes, urlsplit

from coatcheck import tls
from coatcheck.errors import InvalidSettings, TransientError
from coatcheck.log import get_logger
from coatcheck.store.seals import Seal, document_of, seal_of
from coatcheck.worker.redaction import redacted

log = get_logger(__name__)

POST_TIMEOUT_S = 10.0


class SinkUnavailable(TransientError):
    """A sink did not take a seal; it is tried again."""


class Sink(Protocol):
    """A place for seals. `name` is what the database notes of it: no password is in it."""

    @property
    def name(self) -> str: ...

    async def write(self, seal: Seal) -> None:
        """Write a seal for good. Raises SinkUnavailable."""


class FileSink:
    """A file with a line for each seal, in the order in which they were made; it is only ever appended to."""

    def __init__(self, path: str) -> None:
        self.name = f"file:{path}"
        self._path = Path(path)

    async def write(self, seal: Seal) -> None:
        try:
            await asyncio.to_thread(self._append, _line_of(seal))
        except OSError as error:
            raise SinkUnavailable(f"{self.name} cannot be written: {error.strerror or error}") from error

    def _append(self, line: bytes) -> None:
        opened = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            # A line that an earlier crash or a full disk cut off is ended first, so that this one stands alone.
            begins_anew = os.fstat(opened).st_size and not _ends_with_newline(self._path)
            data = (b"\n" if begins_anew else b"") + line
            if os.write(opened, data) != len(data):
                raise OSError(None, "the disk is full")
            os.fsync(opened)
        finally:
            os.close(opened)


class LogSink:
    """The sweeper's own log: the event `seal_made` carries the whole seal."""

    name = "log:"

    async def write(self, seal: Seal) -> None:
        log.info("seal_made", **document_of(seal))


class WebhookSink:
    """An address that gets each seal as a JSON document by POST, and answers with 2xx once it is kept. A user and
    password in it are told as HTTP's basic authentication.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.name = redacted(parts._replace(query="", fragment="").geturl())
        user, at, host = parts.netloc.rpartition("@")
        self._url = parts._replace(netloc=host).geturl()
        basic = base64.b64encode(unquote_to_bytes(user)).decode()
        self._headers = {"authorization": f"Basic {basic}"} if at else {}

    async def write(self, seal: Seal) -> None:
        await asyncio.to_thread(self._post, seal)

    def _post(self, seal: Seal) -> None:
        headers = {"content-type": "application/json", "idempotency-key": f"coatcheck-seal-{seal.number}"}
        headers |= self._headers
        request = urllib.request.Request(self._url, _line_of(seal), headers, method="POST")  # noqa: S310 - checked
        try:
            with _OPENER.open(request, timeout=POST_TIMEOUT_S) as answer:
                status = answer.status
        except urllib.error.HTTPError as error:
            error.close()
            raise SinkUnavailable(f"{self.name} answered {error.code} to seal {seal.number}") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise SinkUnavailable(f"{self.name} cannot be reached: {reason}") from None
        except http.client.HTTPException as error:
            # No HTTP came back, or the address is none: the text of that one holds the address with its secrets.
            raise SinkUnavailable(f"{self.name} cannot be used: {type(error).__name__}") from None
        if not 200 <= status < 300:
            raise SinkUnavailable(f"{self.name} answered {status} to seal {seal.number}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect turns a POST into a GET, which keeps nothing."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects(), urllib.request.HTTPSHandler(context=ssl.create_default_context()))


def parse_sinks(written: str | None) -> list[Sink]:
    """The sinks that a setting names, with commas between them. Raises InvalidSettings."""
    return [_parse_sink(each.strip()) for each in (written or "").split(",") if each.strip()]


def _parse_sink(written: str) -> Sink:
    scheme, _, rest = written.partition(":")
    if scheme in _MAKERS and (made := _MAKERS[scheme](written, rest)) is not None:
        return made
    raise InvalidSettings(
        f"COATCHECK_SEAL_SINK={redacted(written)}: must be file:PATH, log:, or https://HOST/PATH; http:// only to this "
        "machine"
    )


def _make_webhook(written: str, rest: str) -> Sink | None:
    parts = urlsplit(written)
    is_safe = parts.scheme == "https" or tls.is_local(parts.hostname)
    return WebhookSink(written) if parts.hostname and is_safe else None


_MAKERS: Mapping[str, Callable[[str, str], Sink | None]] = {
    "file": lambda written, rest: FileSink(rest) if rest else None,
    "log": lambda written, rest: None if rest else LogSink(),
    "https": _make_webhook,
    "http": _make_webhook,
}


def read_sink(lines: Iterable[bytes]) -> tuple[dict[int, Seal], list[str]]:
    """The seals of a sink's file by number, and what is wrong with it: lines that are none, numbers with two seals.

    Of two seals of one number the first counts: what came later may be an attempt to replace it.
    """
    found: dict[int, Seal] = {}
    wrong: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        seal: Seal | None = None
        with contextlib.suppress(ValueError, RecursionError):
            seal = seal_of(json.loads(line))
        if seal is None:
            wrong.append(f"line {number} is no seal")
        elif found.setdefault(seal.number, seal) != seal:
            wrong.append(f"line {number} has another seal {seal.number} than a line before it")
    return found, wrong


def _line_of(seal: Seal) -> bytes:
    return json.dumps(document_of(seal), separators=(",", ":")).encode() + b"\n"


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
