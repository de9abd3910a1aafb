"""A body that fits a handler, made from its types: what `coatcheck dev` suggests to submit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from coatcheck.broker.bodies import Body
from coatcheck.errors import CoatcheckError
from coatcheck.worker.app import Handler

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
