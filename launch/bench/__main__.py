"""`python -m launch.bench NAME ...`: one measurement per module of this package; each has a `main(arguments)`."""

import importlib
import sys

from launch.arguments import run_command

NAMES = ("chaos", "drafter", "faults", "plan", "river", "scaling", "shapes", "target", "threads", "transport")
_MODULES = {"river": "whole_run"}


def main(arguments: list[str]) -> int:
    """Run the named measurement; return 2 if there is none of that name."""
    if not arguments or arguments[0] not in NAMES:
        print(f"usage: python -m launch.bench {{{','.join(NAMES)}}} ...", file=sys.stderr)
        return 2
    name = _MODULES.get(arguments[0], arguments[0])
    return run_command(importlib.import_module(f"launch.bench.{name}").main, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
