"""Print the reference of all settings as Markdown, made from common/config.py: `python -m launch.settings`.

A setting's meaning is the comment on its line, its type and bounds are its annotation. launch/configs/SETTINGS.md is
the output; a test compares them.
"""

import inspect
import json
import re
from collections.abc import Iterator
from typing import get_args, get_type_hints

import msgspec

from common.config import Config
from common.typed_toml import Section, describe

_TITLE = "# Settings\n\nEvery key of a configuration, printed by `python -m launch.settings`; do not edit.\n"
_HEAD = "| key | value | default | meaning |\n| --- | --- | --- | --- |"
_MADE = ("target_shape", "init_fingerprint")  # filled in by the program, refused in a file
_COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)


def reference() -> str:
    """Return the whole reference."""
    return "\n".join([_TITLE, *_tables(Config, "")])


def _tables(section: type[Section], prefix: str) -> Iterator[str]:
    """Yield a table of the section's own keys, then those of the sections in it."""
    inner = {name: found for name, hint in get_type_hints(section).items() if (found := _section(hint))}
    meanings = {name: text for base in reversed(section.__mro__) for name, text in _comments(base).items()}
    rows = [
        f"| `{prefix}{field.name}` | {describe(field.type)} | {_default(field)} | {meanings[field.name]} |"
        for field in msgspec.inspect.type_info(section).fields  # type: ignore[attr-defined]
        if field.name not in inner and field.name not in _MADE
    ]
    title = prefix.rstrip(".") or "At the top"
    yield f"## {title}\n\n{inspect.getdoc(section)}\n\n{_HEAD}\n" + "\n".join(rows) + "\n"
    for name, found in inner.items():
        yield from _tables(found, f"{prefix}{name}.")


def _section(hint: object) -> type[Section] | None:
    return next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Section)), None)


def _comments(section: type) -> dict[str, str]:
    own = issubclass(section, Section)
    return {name: text.replace("|", "\\|") for name, text in _COMMENT.findall(inspect.getsource(section))} if own else {}


def _default(field: msgspec.inspect.Field) -> str:
    if field.required:
        return "needed"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(reference(), end="")
