"""The runs of this user that are alive, as the kernel knows them: by the command lines of their actors."""

import os
import re
from pathlib import Path

_ACTOR = re.compile(rb"-m\0services\.\w+\0--run-dir\0([^\0]+)\0.*--parent\0(\d+)\0")


def find_alive_runs() -> list[Path]:
    """The run directories of all actors of this user whose supervisor is alive, in order of their names."""
    processes = (process for process in Path("/proc").iterdir() if process.name.isdigit())
    return sorted({run for process in processes if (run := _run_of(process)) is not None})


def _run_of(process: Path) -> Path | None:
    try:
        actor = _ACTOR.search((process / "cmdline").read_bytes())
        if actor is None or process.stat().st_uid != os.getuid():
            return None
        parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:  # it ended
        return None
    return Path(os.fsdecode(actor[1])) if actor[2].decode() == parent else None
