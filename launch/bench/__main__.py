"""`python -m launch.bench NAME ...`: one measurement per module of this package; each has a `main(arguments)`."""

import importlib
import pkgutil
import sys

from launch import bench
from launch.arguments import run_command


def main(arguments: list[str]) -> int:
    """Run the named measurement; exit code 2 where there is none of that name."""
    found = pkgutil.iter_modules(bench.__path__)
    names = sorted(module.name for module in found if not module.ispkg and module.name != "__main__")
    if not arguments or arguments[0] not in names:
        print(f"usage: python -m launch.bench {{{','.join(names)}}} ...", file=sys.stderr)
        return 2
    return run_command(importlib.import_module(f"launch.bench.{arguments[0]}").main, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
