"""`python -m launch.start_all CONFIG`: one command starts, watches and ends a whole run. Loads no torch.

Exit codes: 0 done, 1 an actor gave up, 2 bad configuration or input, 3 the run directory is busy,
128 + n ended early by signal n (start the same command again to go on).
"""

import argparse
import fcntl
import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from common import config as configuration
from common import memory
from common.addresses import exchange_address
from common.board import Board
from common.config import Config
from common.damage import DamagedRows, Ranges, find_damage, write_damaged_rows
from common.dataset import Dataset
from common.errors import ConfigError, HeadraceError, ModelError, RunDirectoryBusyError
from common.slot_table import SlotTable
from launch.child import Child
from launch.live import LiveLine
from launch.plan_table import format_plan
from launch.summary import summarize
from launch.supervisor import Supervisor
from launch.synthetic import write_synthetic
from launch.topology import SharedFds, Topology, describe, plan_topology
from services.exchange.data import read_run_data

EXIT_DONE, EXIT_GAVE_UP, EXIT_BAD_INPUT, EXIT_BUSY, EXIT_SIGNAL = 0, 1, 2, 3, 128


def main() -> int:
    """Parse, check, run; every error a person can mend is one line."""
    parser = argparse.ArgumentParser(prog="python -m launch.start_all", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--run-dir", type=Path, help="default runs/<config>-<time>; an earlier run's directory is resumed")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="print the processes and their memory, start nothing")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_dir = args.run_dir or Path("runs") / f"{args.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        return start(configuration.load(args.config, args.overrides), run_dir, args.dry_run)
    except RunDirectoryBusyError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BUSY
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def start(config: Config, run_dir: Path, dry_run: bool) -> int:
    """Check the input, prepare the run directory, run the actors, say how it ended."""
    topology = plan_topology(config)
    exchange_address(run_dir)
    _check_model(config)
    run_dir = run_dir.absolute()
    config = _with_paths(config, run_dir)
    if config.data.synthetic is None:
        _check_data(config)
    memory.check_available(topology.shared_bytes)
    print(f"{run_dir}\n{describe(topology)}", flush=True)
    if dry_run:
        return EXIT_DONE
    lock = _lock(run_dir)
    try:
        if config.data.synthetic is not None:
            write_synthetic(config, run_dir / "data")
        if config.data.skip_damaged:
            _find_damage(config, run_dir)
        data = read_run_data(config, run_dir)
        print(format_plan(data.plan(config)[0], *data, config.plan), flush=True)
        configuration.write(config, run_dir)
        return _run(config, topology, run_dir)
    finally:
        os.close(lock)


def _run(config: Config, topology: Topology, run_dir: Path) -> int:
    fds = _create_memory(topology)
    board = Board(fds.board, len(topology.actors))
    table = SlotTable(fds.control, config.num_targets * config.ring.num_slots)
    supervisor = Supervisor(config, topology, fds, board, run_dir)
    live = LiveLine(topology, board, table)
    finished = supervisor.run(lambda: live.show(supervisor.restarts.total()))
    live.end()
    if supervisor.culprit:
        return _say_why(supervisor, supervisor.culprit)
    print(summarize(run_dir, config.num_drafters), flush=True)
    if finished:
        return EXIT_DONE
    print(f"stopped; go on with the same command and --run-dir {run_dir}")
    return EXIT_SIGNAL + supervisor.signum


def _say_why(supervisor: Supervisor, culprit: Child) -> int:
    """Input that an actor refused is one line, its last; all else comes with the end of the culprit's log."""
    if supervisor.is_bad_input:
        reason = culprit.last_lines(1).split(" ", 3)[-1]  # after date, time and level
        print(f"error: {culprit.spec.name}: {reason}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"error: {supervisor.failure}\n{culprit.last_lines()}\n(all of it: {culprit.log})", file=sys.stderr)
    return EXIT_GAVE_UP


def _create_memory(topology: Topology) -> SharedFds:
    rings = [memory.create(f"headrace-ring-{index}", topology.ring_bytes) for index in range(topology.num_rings)]
    control = memory.create("headrace-control", topology.table_bytes)
    return SharedFds(rings, control, memory.create("headrace-board", topology.board_bytes))


def _with_paths(config: Config, run_dir: Path) -> Config:
    """Where data and model are, for processes with another working directory; made-up data lie in the run directory."""
    data, model = config.data, config.model
    if data.synthetic is not None:
        folders = str(run_dir / "data" / "train"), str(run_dir / "data" / "eval")
    else:
        folders = _absolute(data.path), _absolute(data.eval_path) if data.eval_path else ""
    data = msgspec.structs.replace(data, path=folders[0], eval_path=folders[1])
    return msgspec.structs.replace(config, data=data, model=msgspec.structs.replace(model, path=_absolute(model.path)))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _check_data(config: Config) -> None:
    """Open what was prepared, for its errors, before anything is written."""
    for path in filter(None, (config.data.path, config.data.eval_path)):
        Dataset.open(Path(path), damaged=config.data.skip_damaged)


def _find_damage(config: Config, run_dir: Path) -> None:
    """Say what is damaged, and leave the rows where the exchange looks."""
    rows: dict[str, Ranges] = {}
    for kind, path in (("train", config.data.path), ("eval", config.data.eval_path)):
        damage = find_damage(Path(path)) if path else []
        for line in damage:
            print(f"damaged: {path}/{line}", flush=True)
        rows[kind] = [span for line in damage for span in line.rows]
    write_damaged_rows(DamagedRows(**rows), run_dir)


def _check_model(config: Config) -> None:
    """The shape was read from config.json already; weights are looked for here, not opened."""
    folder = Path(config.model.path).expanduser()
    if not config.model.random_init and not any(folder.glob("*.safetensors")):
        raise ModelError(f"model.path: needed *.safetensors in {folder}, found none (model.random_init = true needs none)")


def _lock(run_dir: Path) -> int:
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(run_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--run-dir: needed a directory to write to, found {run_dir}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RunDirectoryBusyError(f"--run-dir: needed a directory of no other run, found {run_dir} locked") from None
    return fd


if __name__ == "__main__":
    sys.exit(main())
