"""What is wrong with a config, in words: the dotted key, the value, what is allowed.

Takes msgspec's own errors apart, since they name neither the allowed keys nor the value. Pure.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec
from msgspec import inspect

_PATH = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_OWN = re.compile(r"^`([^`]+)` (.*)$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def require(ok: bool, key: str, value: object, allowed: str) -> None:
    """Check one value of a config section, from its `__post_init__`.

    Raises:
        ValueError: not ok; worded as `explain` expects it.
    """
    if not ok:
        raise ValueError(f"`{key}` is {value!r}; allowed: {allowed}")


def explain(error: msgspec.ValidationError, data: object, kind: type) -> str:
    """`error` of converting `data` to `kind`, in words."""
    text = str(error)
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    what = text[: found.start()] if found else text
    place = path.removeprefix(".")
    if unknown := _UNKNOWN.match(what):
        return _unknown(unknown.group(1), place, _type_at(kind, path))
    if missing := _MISSING.match(what):
        return f"`{_join(place, missing.group(1))}` is missing"
    if own := _OWN.match(what):
        # A section's own words: its key, the value, what is allowed.
        return f"`{_join(place, own.group(1))}` {own.group(2)}"
    value, known = _value_at(data, path)
    key = f"`{place}`" if place else "the config"
    shown = f"{key} is {_shown(value)}" if known else key
    return f"{shown}; allowed: {_allowed(_type_at(kind, path), what)}"


def _unknown(field: str, place: str, owner: inspect.Type | None) -> str:
    fields = owner.fields if isinstance(owner, inspect.StructType) else ()
    names = [one.encode_name for one in fields]
    close = difflib.get_close_matches(field, names, n=1)
    hint = f"did you mean `{_join(place, close[0])}`? " if close else ""
    where = f"in `{place}`" if place else "at the top"
    return (
        f"`{_join(place, field)}` is no key of the config; {hint}allowed {where}: "
        f"{', '.join(names)}"
    )


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _value_at(data: object, path: str) -> tuple[Any, bool]:
    """The value at a path, and whether it could be found ("..." says only: some item)."""
    value: Any = data
    for name, index in _STEP.findall(path):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return None, False
    return value, True


def _type_at(kind: type, path: str) -> inspect.Type | None:
    found: inspect.Type | None = inspect.type_info(kind)
    for name, index in _STEP.findall(path):
        if name and isinstance(found, inspect.StructType):
            found = next((f.type for f in found.fields if f.encode_name == name), None)
        elif isinstance(found, inspect.VarTupleType | inspect.ListType):
            found = found.item_type
        elif isinstance(found, inspect.TupleType) and index.isdigit():
            found = found.item_types[int(index)]
        else:
            return None
    return found


def _allowed(kind: inspect.Type | None, what: str) -> str:
    """What may stand there; msgspec's own words where the type says too little."""
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(repr(value) for value in kind.values)
    if isinstance(kind, inspect.StructType):
        return f"a table with {', '.join(field.encode_name for field in kind.fields)}"
    words = {
        inspect.BoolType: "true or false",
        inspect.IntType: "a whole number",
        inspect.FloatType: "a number",
        inspect.StrType: "text in quotes",
        inspect.VarTupleType: "a list",
        inspect.ListType: "a list",
    }
    if isinstance(kind, inspect.TupleType):
        return f"a list of {len(kind.item_types)}"
    return next((word for one, word in words.items() if isinstance(kind, one)), what)
