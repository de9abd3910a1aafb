"""From `module:app` to an App, with an answer for everything that can be wrong on the way."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import click

from coatcheck.worker.app import App
from coatcheck.worker.problems import traceback_of


class ImportFailed(click.ClickException):
    """The user's module raised while it was imported: their traceback, then one line of ours."""

    def __init__(self, module: str, error: BaseException) -> None:
        super().__init__(f"{module} cannot be imported: {type(error).__name__}: {error}")
        self.trace = _user_traceback(error)

    def show(self, file: object = None) -> None:
        click.echo(self.trace, err=True, nl=False)
        click.echo(f"Error: {self.format_message()}", err=True)


def load_app(reference: str) -> App:
    """Import the App that `module:name` names; `module` alone will do if it has exactly one.

    Raises click.UsageError when the reference is wrong, ImportFailed when the module is.
    """
    module_name, _, name = reference.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        dotted = re.sub(r"\.py$", "", module_name).strip("./").replace("/", ".")
        raise click.UsageError(f"{module_name} is a path; name the module instead: {dotted}:{name or 'app'}")
    if not module_name:
        raise click.UsageError(f"{reference!r} names no module; write MODULE:APP, such as research:app")
    module = _import(module_name)
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    return _pick(module_name, module, name, apps)


def _pick(module_name: str, module: ModuleType, name: str, apps: dict[str, App]) -> App:
    known = ", ".join(f"{module_name}:{each}" for each in apps)
    has = f"it has {known}" if apps else 'it has no App at all; make one: app = App("name")'
    if not name:
        if len(apps) == 1:
            return next(iter(apps.values()))
        raise click.UsageError(f"say which App of {module_name} to run; {has}")
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(name, apps, n=1)
            hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
            raise click.UsageError(f"{module_name} has no {name!r}; {has}{hint}")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise click.UsageError(f"{module_name}:{name} is a {type(found).__name__}, not an App; {has}")
    return found


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself, or a package on the way to it; anything else is an import inside the user's code.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise click.UsageError(
                f"there is no module {error.name!r} in {here} nor on the Python path; run from the directory that "
                "holds it, or set PYTHONPATH"
            ) from error
        raise ImportFailed(name, error) from error
    except Exception as error:  # user code: what it raises is its author's to read
        raise ImportFailed(name, error) from error


def _user_traceback(error: BaseException) -> str:
    """The traceback from the user's first line on, without the import machinery above it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_machinery(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    if frames is not None and _is_machinery(frames.tb_frame.f_code.co_filename):
        frames = None  # it never got as far as a line of theirs: a SyntaxError, which shows its own
    return traceback_of(error.with_traceback(frames))


def _is_machinery(filename: str) -> bool:
    return filename.startswith("<frozen ") or filename in {__file__, importlib.__file__}
