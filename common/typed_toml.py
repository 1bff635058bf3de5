"""TOML with overrides, converted to the types of the settings; every error names the full key.

`describe` puts the type and the bounds of a setting into words, for the errors and for the reference (launch.settings).
"""

import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from common.errors import ConfigError

T = TypeVar("T")
Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
DType = Literal["float32", "bfloat16"]
Device = Annotated[str, Meta(pattern=r"^(cpu|cuda:\d+)$", description="cpu or cuda:N")]
Devices = Annotated[
    str,
    Meta(
        pattern=r"^(cpu(\+cpu)*|cuda:\d+(\+cuda:\d+)*)$",
        description="cpu or cuda:N, or several of one kind joined by +",
    ),
]
_FIELD = re.compile(r"(missing required|contains unknown) field `(.*?)`")
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_STEP = re.compile(r"\[.*?\]|[^.\[]+")
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the TOML file; unknown keys are errors."""


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def override(tree: dict[str, Any], text: str) -> None:
    """Set one key of the tree by `key=value`; a value that is no TOML is a string."""
    key, equals, value_text = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text}: needed key=value, such as ring.num_slots=8")
    try:
        value: Any = tomllib.loads(f"value = {value_text}")["value"]
    except tomllib.TOMLDecodeError:
        value = value_text
    *tables, name = key.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {text}: {table} is a value, not a table")
    tree[name] = value


def convert(tree: dict[str, Any], struct: type[T], prefix: str = "") -> T:
    """Convert to a struct; ConfigError for the first key that is unknown, missing, of another type or out of bounds."""
    _check_finite(tree, "")
    try:
        return msgspec.convert(tree, struct)
    except msgspec.ValidationError as error:
        raise ConfigError(prefix + _explain(str(error), tree, struct)) from error


def describe(kind: inspect.Type) -> str:
    """Return the values that a setting may have, such as "an integer, at least 1"."""
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            return str((extra or {}).get("description") or describe(inner))
        case inspect.UnionType(types=types):
            return " or ".join(describe(inner) for inner in types if not isinstance(inner, inspect.NoneType))
        case inspect.LiteralType(values=values):
            return " or ".join(map(str, values))
        case inspect.ListType(item_type=item):
            entries = f"a list of {bounds(kind)}, each" if bounds(kind) else "a list, each entry"
            return f"{entries} {describe(item)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            number = "an integer" if isinstance(kind, inspect.IntType) else "a number"
            return f"{number}, {bounds(kind)}" if bounds(kind) else number
        case inspect.StrType():
            return "a string"
        case _:
            return "a table"


def bounds(kind: inspect.Type) -> str:
    """Return the bounds of a number or of the length of a list, in words; "" if there are none."""
    if isinstance(kind, inspect.ListType):
        return f"{kind.min_length} or more entries" if kind.min_length else ""
    found = ((words, getattr(kind, name, None)) for name, words in _BOUNDS.items())
    return " and ".join(f"{words} {bound:g}" for words, bound in found if bound is not None)


def _check_finite(value: object, key: str) -> None:
    """Refuse inf and nan, which TOML knows: no setting may be either."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_finite(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}: needed a finite number, found {value}")


def _explain(message: str, tree: dict[str, Any], struct: type) -> str:
    """Rewrite an error of msgspec, which names types of Python, in the form `key: needed X, found Y`."""
    at = _PATH.search(message)
    key, kind, value = _follow(at[1] if at else "", inspect.type_info(struct), tree)
    if field := _FIELD.search(message):
        problem, name = field.groups()
        fields, full_key = _fields(kind), f"{key}.{name}" if key else name
        if problem == "missing required":
            return f"{full_key}: needed {describe(fields[name])}, found nothing"
        return f"{full_key}: needed a key among {', '.join(fields)}, found none of this name"
    out_of_bounds = bounds(kind) if ", got " not in message else ""
    return f"{key}: needed {out_of_bounds or describe(kind)}, found {value}"


def _follow(path: str, kind: inspect.Type, value: Any) -> tuple[str, inspect.Type, Any]:
    """Return key, type and value at a path of msgspec: `ring.num_slots`, `targets.devices[0]`, `data.eval_paths[...]`."""
    names = []
    for step in _STEP.findall(path):
        if isinstance(kind, inspect.ListType):
            kind, value = kind.item_type, value[int(step[1:-1])]
        elif isinstance(kind, inspect.DictType):
            kind = kind.value_type  # msgspec does not say which entry
        else:
            names.append(step)
            kind, value = _fields(kind)[step], value[step]
    return ".".join(names), kind, value


def _fields(kind: inspect.Type) -> dict[str, inspect.Type]:
    for struct in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(struct, inspect.StructType):
            return {field.name: field.type for field in struct.fields}
    return {}


def need(holds: bool, key: str, needed: str, found: object) -> None:
    """Raise ConfigError unless it holds."""
    if not holds:
        raise ConfigError(f"{key}: needed {needed}, found {found}")
