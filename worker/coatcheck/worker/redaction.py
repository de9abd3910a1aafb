"""Texts that others wrote, made fit to be shown: without passwords, cut, and without a way to steer a terminal.

Each function passes over a text a fixed number of times, however it is written: peers choose what their errors say, and
the loop stands still while one is shown. What has a limit is cut before it is searched.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

__all__ = ["clean", "clean_json", "redacted", "redacted_ends", "redacted_start"]

_SPACE = re.compile(r"\s")
_USER = re.compile(r"://[^:/?#\s@]*:")
_QUOTED = r"""'(?:[^'\\\n]|\\.)*+'?|"(?:[^"\\\n]|\\.)*+"?"""
_SECRET_PARAMETER = re.compile(rf"""(?i)(password|passwd|pwd|secret|token|api_?key)=(?:{_QUOTED}|[^&\s'"]+)""")


# --- passwords ---


def redacted(text: str) -> str:
    """Return `text` with the passwords of its URLs replaced by ***. When in doubt it hides too much."""
    if "://" in text:
        text = _without_passwords(text)
    if "=" in text:
        text = _SECRET_PARAMETER.sub(r"\1=***", text)
    return text


def redacted_start(text: str, limit: int) -> str:
    """Return the first `limit` characters of a text, redacted. A password that is cut in two stays hidden."""
    if len(text) <= limit:
        return redacted(text)
    # With a sign for the end of a password, one whose own sign is cut off is seen as well.
    return redacted(text[:limit] + "@").removesuffix("@")[:limit] + "…"


def redacted_ends(text: str, limit: int) -> str:
    """Return a text redacted, and without its middle if it is longer than `limit`."""
    if len(text) <= limit:
        return redacted(text)
    half = limit // 2
    cut = _SPACE.search(text, len(text) - half)  # the rest of a word that is cut in two may be the rest of a password
    end = text[cut.end() :] if cut else ""
    return f"{redacted_start(text, half)}\n… {len(text) - half - len(end)} characters left out …\n{redacted(end)}"


def _without_passwords(text: str) -> str:
    """Hide what stands between `://user:` and the last @ before the next blank."""
    pieces: list[str] = []
    copied, word_end, last_at = 0, -1, -1
    start = text.find("://")
    while start >= 0:
        if start >= word_end:
            blank = _SPACE.search(text, start)
            word_end = blank.start() if blank else len(text)
            last_at = text.rfind("@", start, word_end)
        user = _USER.match(text, start, max(last_at, start))
        if user:
            pieces += (text[copied : user.end()], "***")
            copied = last_at
            start = text.find("://", word_end)
        else:
            start = text.find("://", start + 3)
    return "".join((*pieces, text[copied:]))


# --- what steers a terminal ---


def clean(text: str) -> str:
    """Spell out control characters and those that turn the direction of writing; newlines and tabs stay."""
    return text if text.isprintable() else _spelled_out(text, _spelled)


def clean_json(document: bytes) -> str:
    """Escape in a JSON document what `clean` spells out. A program reads the same values from it."""
    if document.isascii() and b"\x7f" not in document:  # JSON itself escapes the other control characters of ASCII
        return document.decode()
    return _spelled_out(document.decode(), _escaped)


def _spelled_out(text: str, spell: Callable[[str], str]) -> str:
    return text.translate({ord(each): spell(each) for each in set(text) if not _is_harmless(each)})


def _is_harmless(character: str) -> bool:
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


def _spelled(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
