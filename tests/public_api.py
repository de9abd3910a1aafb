"""The public API, the wire's headers and the settings' variables as text: `tests/public_api.txt` is the recorded copy.

`python -m tests.public_api` records it anew, when a change is meant. A class that is not public is written as `…`, and
no module is named but the four public ones: so moving or renaming what is internal changes nothing here.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import importlib
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NewType, TypeVar

from coatcheck.broker import headers
from coatcheck.worker.settings import ENVIRONMENT

RECORD = Path(__file__).parent / "public_api.txt"
MODULES = ("coatcheck.worker", "coatcheck.broker", "coatcheck.store", "coatcheck.testing")
INTERNAL = "…"
# Special methods that a user writes in another form: `async with`, `await`, `for`, a call, an index, `len`.
_SPECIAL = {
    *("__aenter__", "__aexit__", "__enter__", "__exit__", "__aiter__", "__anext__", "__iter__", "__next__"),
    *("__await__", "__call__", "__getitem__", "__contains__", "__len__", "__bool__"),
}
_MODULE_PATH = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
_EMPTY = inspect.Parameter.empty


def describe() -> str:
    """Return what is public: a line for each name, method, attribute, header and variable."""
    blocks = [_module_lines(name) for name in MODULES]
    blocks.append([f"# headers of the wire, version {headers.VERSION}", *_header_lines()])
    blocks.append(["# environment variables of the settings", *sorted(ENVIRONMENT)])
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _header_lines() -> list[str]:
    read_off = {"a service's queues": headers.arriving(is_dead=False), "dead letters": headers.arriving(is_dead=True)}
    return [
        f"{header}: read off {' and '.join(queue for queue, names in read_off.items() if header in names)}"
        for header in sorted(headers.MAY_PASS)
    ]


def _module_lines(module_name: str) -> list[str]:
    lines = [f"# {module_name}"]
    for name, value in sorted(_public(module_name).items()):
        if isinstance(value, type):
            lines += _class_lines(name, value)
        elif inspect.isfunction(value):
            lines.append(_function_line(name, value))
        else:
            lines.append(f"{name} = {_value_text(value)}")
    return lines


def _public(module_name: str) -> dict[str, Any]:
    module = importlib.import_module(module_name)
    return {name: getattr(module, name) for name in module.__all__}


_PUBLIC_NAMES = {name for module_name in MODULES for name in _public(module_name)}
_PUBLIC_CLASSES = [each for name in MODULES for each in _public(name).values() if isinstance(each, type)]


def _class_lines(name: str, kind: type) -> list[str]:
    parents = [base for base in kind.__mro__[1:] if _is_promised(base)]
    nearest = [base for base in parents if not any(issubclass(each, base) for each in parents if each is not base)]
    head = f"class {name}({', '.join(base.__name__ for base in nearest)})" if nearest else f"class {name}"
    if issubclass(kind, enum.Enum):
        return [head, *(f"  {each.name} = {each.value!r}" for each in kind)]
    return [head, *(f"  {line}" for line in _member_lines(kind))]


def _is_promised(base: type) -> bool:
    """Tell whether users may rely on this ancestor: it is public, or Python's own, such as TimeoutError or StrEnum."""
    is_pythons = base.__module__ in {"builtins", "enum"} and base is not object
    return is_pythons or base in _PUBLIC_CLASSES


def _member_lines(kind: type) -> Iterator[str]:
    members = _own_members(kind)
    if "__init__" in members or dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__"):
        yield _function_line("__init__", kind)
    yield from (f"{name}  (set by the constructor)" for name in _facts(kind))
    for name, base in sorted(members.items()):
        if name.startswith("_") and name not in _SPECIAL:
            continue
        value, home = vars(base).get(name), vars(sys.modules[base.__module__])
        if isinstance(value, property):
            assert value.fget is not None
            text = f"{name}: {_annotation_text(inspect.signature(value.fget).return_annotation, home)}"
            yield text if value.fset is not None else f"{text}  (read only)"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{type(value).__name__} {_function_line(name, value.__func__)}"
        elif inspect.isfunction(value):
            yield _function_line(name, value)
        elif name in vars(base).get("__annotations__", ()):
            yield f"{name}: {_annotation_text(vars(base)['__annotations__'][name], home)}"
        else:
            yield name if inspect.isdatadescriptor(value) else f"{name} = {_value_text(value)}"


def _facts(kind: type) -> list[str]:
    """Return what an error's constructor sets on it: facts that an `except` reads."""
    if not issubclass(kind, BaseException) or "__init__" not in _own_members(kind):
        return []
    source = textwrap.dedent(inspect.getsource(inspect.getattr_static(kind, "__init__")))
    stored = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Attribute)]
    return sorted({each.attr for each in stored if isinstance(each.ctx, ast.Store) and not each.attr.startswith("_")})


def _own_members(kind: type) -> dict[str, type]:
    """Return the members that our code gives a class, each with the class that defines it; none of a library's."""
    members: dict[str, type] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("coatcheck."):
            members |= dict.fromkeys((*vars(base), *vars(base).get("__annotations__", ())), base)
    return members


def _function_line(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    home = vars(sys.modules[function.__module__])
    if isinstance(function, type):  # an inherited constructor speaks of what its own module knows
        home = getattr(inspect.getattr_static(function, "__init__"), "__globals__", home)
    words, is_keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name.startswith("_") and parameter.kind is not parameter.VAR_POSITIONAL:
            continue  # a private field of a value that users receive and never build
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            words.append("*")
        is_keyword_only |= parameter.kind in {parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL}
        words.append(_parameter_text(parameter, home))
    prefix = "async def" if inspect.iscoroutinefunction(function) else "def"
    returns = "" if isinstance(function, type) else f" -> {_annotation_text(signature.return_annotation, home)}"
    line = f"{prefix} {name}({', '.join(words)}){returns}"
    if len(line) > 120:
        line = "\n".join((f"{prefix} {name}(", *(f"      {word}," for word in words), f"  ){returns}"))
    return line


def _parameter_text(parameter: inspect.Parameter, home: Mapping[str, Any]) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    text = stars.get(parameter.kind.name, "") + parameter.name
    if parameter.annotation is not _EMPTY:
        text += f": {_annotation_text(parameter.annotation, home)}"
    if parameter.kind is parameter.POSITIONAL_ONLY:
        text += " (by position)"
    return text if parameter.default is _EMPTY else f"{text} = {_value_text(parameter.default)}"


def _annotation_text(annotation: Any, home: Mapping[str, Any]) -> str:
    """Write an annotation with the names that users know. `home` holds what its text may speak of."""
    if annotation is _EMPTY:
        return "?"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return ast.unparse(_Plain(home).visit(ast.parse(text, mode="eval")))


class _Plain(ast.NodeTransformer):
    """Drop module paths and what `Annotated` adds; open aliases; hide classes that are not public."""

    def __init__(self, home: Mapping[str, Any]) -> None:
        self._home = home

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_internal = ast.unparse(node).startswith("coatcheck.") and node.attr not in _PUBLIC_NAMES
        return ast.Name(INTERNAL if is_internal else node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value).endswith("Annotated") and isinstance(node.slice, ast.Tuple):
            node_of_type: ast.AST = self.visit(node.slice.elts[0])
            return node_of_type
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self._home.get(node.id, getattr(typing, node.id, None))
        if isinstance(value, TypeVar | NewType) or hasattr(builtins, node.id):
            return node
        if value is None:  # imported for the type checker alone
            return node if node.id in _PUBLIC_NAMES else ast.Name(INTERNAL)
        if isinstance(value, type) or value.__module__ == "typing":
            is_internal = value.__module__.startswith("coatcheck.") and value not in _PUBLIC_CLASSES
            return ast.Name(INTERNAL) if is_internal else node
        opened: ast.AST = self.visit(ast.parse(inspect.formatannotation(value), mode="eval").body)
        return opened


def _value_text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, NewType):
        return f"NewType({value.__supertype__.__name__})"
    if inspect.isroutine(value):
        return value.__name__
    return _MODULE_PATH.sub("", repr(value))


if __name__ == "__main__":
    RECORD.write_text(describe())
