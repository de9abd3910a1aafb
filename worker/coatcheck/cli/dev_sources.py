"""The code that `coatcheck dev` runs: its files, word of their changes, and what its Apps offer.

The notifier only wakes us; what has changed is told by comparing the files with what they were. So an editor's
temporary files, a directory that appears and a burst of writes all come out right. Each directory is watched by itself:
a recursive watch would also sit on `.coatcheck/`, where Postgres writes all day.

    python -m coatcheck.cli.dev_sources module:app

imports an App in a fresh interpreter and prints what it offers as JSON, so that a mistake in the code costs nothing.
The module's own output goes to stderr. What is wrong is told there too, with exit code 2 for a reference that names
nothing, 1 for code that raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeAlias

import click
import msgspec

from coatcheck.broker.bodies import Body
from coatcheck.cli.apps import load_app
from coatcheck.errors import CoatcheckError, UsageError
from coatcheck.worker.app import App, Handler

DEBOUNCE_MS = 1_000
QUIET_MS = 100
"""A change is told when the files have been quiet for so long, or the burst goes on for longer than the debounce."""
LOOK_EVERY_MS = 2_000
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "venv"})
"""Besides everything that begins with a dot, and virtual environments under any name."""

PROBE_PATIENCE_S = 60.0
WRONG_REFERENCE = 2
DOTS = "…"
DEEPEST = 8
FORMATS = {
    "date-time": "2030-01-01T00:00:00Z",
    "date": "2030-01-01",
    "time": "12:00:00",
    "duration": "PT1M",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "decimal": "1.5",
    "email": "you@example.com",
    "uri": "https://example.com/",
}

Stamps: TypeAlias = dict[Path, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Seen:
    """The directories of a project and its Python files, as they were at one moment."""

    directories: frozenset[Path]
    stamps: Stamps

    def changed_since(self, before: Seen) -> list[Path]:
        """The files that are new, gone or different."""
        both = self.stamps.keys() | before.stamps.keys()
        return sorted(path for path in both if self.stamps.get(path) != before.stamps.get(path))


def find_root(reference: str, here: Path) -> Path | None:
    """The directory that `module:app` is imported from, without importing it. An installed package is its own root."""
    name = reference.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(name, [str(here), *sys.path]) or importlib.util.find_spec(name) if name else None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    found = Path(places[0] if places else str(spec.origin)).resolve()
    if SKIPPED & set(found.parent.parts):
        return found if found.is_dir() else found.parent
    return found.parent


def look(roots: Iterable[Path]) -> Seen:
    """Read the tree; what disappears meanwhile, or must not be read, is not there."""
    directories, stamps = set[Path](), Stamps()
    for root in roots:
        for place, names, files in os.walk(root):
            directory = Path(place)
            directories.add(directory)
            names[:] = [name for name in names if not _is_skipped(directory / name)]
            for name in files:
                if name.endswith(".py"):
                    _stamp(directory / name, stamps)
    return Seen(frozenset(directories), stamps)


async def watch(roots: Sequence[Path], *, since: Seen) -> AsyncGenerator[list[Path], None]:
    """Tell which files have changed, whenever some have. Raises UsageError if this machine cannot watch them."""
    before = since
    while True:
        async with aclosing(_wake_ups(before.directories)) as wake_ups:
            async for _ in wake_ups:
                now = await asyncio.to_thread(look, roots)
                changed, is_same_tree = now.changed_since(before), now.directories == before.directories
                before = now
                if changed:
                    yield changed
                if not is_same_tree:
                    break


async def _wake_ups(directories: Iterable[Path]) -> AsyncGenerator[None, None]:
    """Return after every burst of events, and now and then without one: what happened before we watched had none."""
    try:
        from watchfiles import awatch
    except ImportError as error:
        raise no_watcher() from error
    there = [directory for directory in directories if directory.is_dir()]
    waking = awatch(
        *there,
        watch_filter=None,
        debounce=DEBOUNCE_MS,
        step=QUIET_MS,
        rust_timeout=LOOK_EVERY_MS,
        yield_on_timeout=True,
        recursive=False,
    )
    try:
        async with aclosing(waking):
            async for _ in waking:
                yield
    except OSError as error:
        raise UsageError(
            f"{len(there)} directories cannot be watched for changes ({error}); start where fewer are, raise "
            "fs.inotify.max_user_watches, or add --no-reload"
        ) from error


def no_watcher() -> UsageError:
    return UsageError("reloading on change needs watchfiles: pip install 'coatcheck[embedded]', or add --no-reload")


def _is_skipped(directory: Path) -> bool:
    return directory.name.startswith(".") or directory.name in SKIPPED or (directory / "pyvenv.cfg").exists()


def _stamp(path: Path, stamps: Stamps) -> None:
    try:
        found = path.stat()
    except OSError:
        return
    stamps[path] = (found.st_mtime_ns, found.st_size)


# --- can this code be run, and what does it offer ---


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
        *(sys.executable, "-m", "coatcheck.cli.dev_sources", reference),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for `dev` alone, which then ends this
    )
    try:
        async with asyncio.timeout(PROBE_PATIENCE_S):
            out, err = await process.communicate()
    except TimeoutError:
        return Broken(reference, f"Error: {reference} was not imported within {PROBE_PATIENCE_S:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return msgspec.json.decode(out, type=Offer)
    text = err.decode("utf-8", "replace").rstrip() or f"Error: {reference} ended with code {process.returncode}"
    return Broken(reference, text, process.returncode == WRONG_REFERENCE)


def describe(reference: str, app: App) -> Offer:
    names = tuple(sorted(app.handlers))
    handler = app.find_handler(None)
    if handler is not None or not names:
        return Offer(reference, app.service, names, example_of(handler) if handler else '"…"')
    named = app.handlers[names[0]]
    return Offer(reference, app.service, names, example_of(named), task=names[0])


def _main(reference: str) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            offer = describe(reference, load_app(reference))
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CoatcheckError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    except SystemExit as error:
        click.echo(f"Error: {reference} called sys.exit({error.code!r}) while it was imported", err=True)
        return 1
    click.echo(json.dumps(asdict(offer)))
    return 0


# --- a body that fits a handler, made from its types ---


def example_of(handler: Handler) -> str:
    """A body this handler takes, as JSON, with dots where only its author knows better; empty if it takes none."""
    parameters = handler.binding.parameters
    if not parameters:
        return ""
    samples = {it.name: sample_of(it.type) for it in parameters}
    named = {it.name: samples[it.name] for it in parameters if it.is_required}
    whole = samples[parameters[0].name] if len(parameters) == 1 else named
    # The schema of a datetime does not say that it is one: perhaps the dots stand for it.
    for body in (whole, named, _dated(whole), DOTS):
        if _fits(handler, body):
            return json.dumps(body, ensure_ascii=False)
    return json.dumps(whole, ensure_ascii=False)


def sample_of(wanted: Any) -> Any:
    """A value of a type, in JSON's terms."""
    try:
        schema = msgspec.json.schema(wanted, schema_hook=_foreign_schema)
    except (TypeError, NotImplementedError):
        return DOTS
    return _sample(schema, schema.get("$defs", {}), depth=0)


def _foreign_schema(wanted: type) -> dict[str, Any]:
    if not hasattr(wanted, "model_json_schema"):
        raise NotImplementedError
    schema: dict[str, Any] = wanted.model_json_schema()
    return schema


def _dated(body: Any) -> Any:
    written = json.dumps(body).replace(json.dumps(DOTS), json.dumps(FORMATS["date-time"]))
    return json.loads(written)


def _fits(handler: Handler, body: Any) -> bool:
    try:
        handler.binding.bind(Body.of(body))
    except CoatcheckError:
        return False
    return True


def _sample(schema: Mapping[str, Any], known: Mapping[str, Any], *, depth: int) -> Any:
    known = {**known, **schema.get("$defs", {})}
    if depth > DEEPEST:
        return DOTS
    for name in ("examples", "enum"):
        if schema.get(name):
            return schema[name][0]
    if "const" in schema:
        return schema["const"]
    if "$ref" in schema:
        return _sample(known.get(schema["$ref"].rpartition("/")[2], {}), known, depth=depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        choices = [each for each in schema.get(name, ()) if each.get("type") != "null"]
        if choices:
            return _sample(choices[0], known, depth=depth + 1)
    return _plain_sample(schema, known, depth=depth)


def _plain_sample(schema: Mapping[str, Any], known: Mapping[str, Any], *, depth: int) -> Any:
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            return {name: _sample(properties[name], known, depth=depth + 1) for name in schema.get("required", ())}
        case "array":
            items = schema.get("prefixItems") or [schema.get("items") or {}] * max(1, schema.get("minItems", 1))
            return [_sample(each, known, depth=depth + 1) for each in items if isinstance(each, dict)]
        case "integer" | "number" as kind:
            return _number(schema, is_whole=kind == "integer")
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return _text(schema)


def _text(schema: Mapping[str, Any]) -> str:
    if schema.get("contentEncoding") == "base64":
        return ""
    dots: str = DOTS * max(1, schema.get("minLength", 1))
    return FORMATS.get(str(schema.get("format")), dots)


def _number(schema: Mapping[str, Any], *, is_whole: bool) -> float:
    """1 or 1.5, or the nearest number that the schema allows."""
    step = schema.get("multipleOf") or 1
    value: float = 1 if is_whole or "multipleOf" in schema else 1.5
    if "minimum" in schema or "exclusiveMinimum" in schema:
        value = max(value, schema.get("minimum", value), schema.get("exclusiveMinimum", value - step) + step)
    if "maximum" in schema or "exclusiveMaximum" in schema:
        value = min(value, schema.get("maximum", value), schema.get("exclusiveMaximum", value + step) - step)
    return -(-value // step) * step if "multipleOf" in schema else value


if __name__ == "__main__":
    code = _main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that the module has started do not keep us
