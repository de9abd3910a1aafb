"""`coatcheck show --damaged`: stored values that cannot be read, with a look at their bytes, and the bytes as files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from coatcheck.cli.check import finding_document
from coatcheck.cli.output import emit_json, say
from coatcheck.store.rows import TaskId
from coatcheck.worker.checking import Checked, Finding

PREVIEW_BYTES = 64
BYTES_A_LINE = 16


def tell_damaged(checked: Checked, *, save: Path | None, as_json: bool) -> None:
    """List a task's damaged values; with `save`, write each into a file of that directory."""
    damaged = [finding for finding in checked.findings if finding.value is not None]
    files = [None] * len(damaged) if save is None else [_save(save, checked.task.task_id, each) for each in damaged]
    if as_json:
        listed = [_document(each, file) for each, file in zip(damaged, files, strict=True)]
        emit_json({"task_id": checked.task.task_id, "damaged": listed})
        return
    for finding, file in zip(damaged, files, strict=True):
        _print(finding, file)
    say(f"{len(damaged) or 'No'} damaged value{'' if len(damaged) == 1 else 's'}", err=True, style="dim")


def _print(finding: Finding, file: Path | None) -> None:
    value = finding.value or b""
    say(f"{finding.place}{'' if finding.key is None else f', key {finding.key}'}", style="bold")
    say(f"  {finding.what}")
    say(f"  {len(value)} bytes{'' if finding.is_live else ', not needed any more'}")
    for line in hex_lines(value):
        say(f"    {line}")
    say(f"  saved: {file}" if file is not None else f"  fix: {finding.fix}")


def hex_lines(value: bytes) -> Sequence[str]:
    """The beginning of some bytes: place, hexadecimal digits, printable characters."""
    shown = value[:PREVIEW_BYTES]
    lines = []
    for begin in range(0, len(shown), BYTES_A_LINE):
        part = shown[begin : begin + BYTES_A_LINE]
        text = "".join(chr(each) if 0x20 <= each < 0x7F else "." for each in part)
        lines.append(f"{begin:04x}  {part.hex(' ').ljust(BYTES_A_LINE * 3 - 1)}  {text}")
    return [*lines, f"… {len(value) - len(shown)} more bytes"] if len(value) > len(shown) else lines


def _save(directory: Path, task_id: TaskId, finding: Finding) -> Path:
    """Write the bytes as they are, for this user's eyes only. The name is made of ids: a key may hold anything."""
    row = "" if finding.table == "task" else f"-{finding.row.replace(' ', '-')}"
    path = directory / f"{task_id}-{finding.table}{row}-{finding.column}.bin"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(finding.value or b"")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}; name a directory of yours") from error
    return path


def _document(finding: Finding, file: Path | None) -> dict[str, object]:
    preview = (finding.value or b"")[:PREVIEW_BYTES].hex()
    return finding_document(finding) | {"preview": preview, "file": None if file is None else str(file)}
