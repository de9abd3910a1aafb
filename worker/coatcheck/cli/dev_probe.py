"""Can this code be run, and what does it offer: asked of a fresh interpreter, so that a mistake costs nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

PATIENCE_S = 60.0
WRONG_REFERENCE = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """What an App has: the name of its service, its handlers, and a body its default handler may take."""

    reference: str
    service: str
    handlers: tuple[str, ...]
    example: str
    task: str = ""
    """The handler that the example is for, if it has to be named."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Why an App cannot be had, as its author should read it."""

    reference: str
    text: str
    is_wrong_usage: bool = False


async def probe(reference: str, *, environ: Mapping[str, str]) -> Offer | Broken:
    """Import an App in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coatcheck.cli.dev_describe", reference),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for `dev` alone, which then ends this
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            out, err = await process.communicate()
    except TimeoutError:
        return Broken(reference, f"Error: {reference} was not imported within {PATIENCE_S:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return msgspec.json.decode(out, type=Offer)
    text = err.decode("utf-8", "replace").rstrip() or f"Error: {reference} ended with code {process.returncode}"
    return Broken(reference, text, process.returncode == WRONG_REFERENCE)
