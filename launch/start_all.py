"""`python -m launch.start_all CONFIG`: one command starts, watches and ends a whole run. Loads no torch.

Exit codes: 0 done, 1 an actor gave up, 2 bad configuration or input, 3 the run directory is busy,
128 + n ended early by signal n (start the same command again to go on).
"""

import argparse
import logging
import os
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path

import msgspec

from common import config as configuration
from common.actor.board import Board
from common.config import Config
from common.data.damage import DamagedRows, Ranges, find_damage, write_damaged_rows
from common.drafter_files import fingerprint_drafter
from common.errors import HeadraceError, ModelError, RunDirectoryBusyError
from common.ring import memory
from common.ring.slot_table import SlotTable
from common.run_dir import DATA, exchange_address, log_path, report_path
from launch.data.synthetic import write_synthetic
from launch.operate.control_messages import RunStatus
from launch.operate.control_server import ControlServer
from launch.operate.data_check import check_data
from launch.operate.live import LiveLine, show
from launch.operate.log_file import last_lines, last_message
from launch.operate.pace import Pace
from launch.operate.plan_table import format_plan
from launch.operate.report import Ending, write_report
from launch.operate.requirements import check_devices, find_absent
from launch.operate.resume import check_resume
from launch.operate.run_directory import check_run_dir, lock_run_dir
from launch.operate.status import Gauges
from launch.operate.summary import summarize
from launch.operate.supervisor import Supervisor
from launch.operate.topology import SharedFds, Topology, describe, plan_topology
from services.exchange.plan import Plan
from services.exchange.samples import read_run_data

EXIT_DONE, EXIT_GAVE_UP, EXIT_BAD_INPUT, EXIT_BUSY, EXIT_SIGNAL = 0, 1, 2, 3, 128
_NUM_LAST_LINES = 12
log = logging.getLogger(__name__)


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
        stand_in = args.config.with_name(f"{args.config.stem}_target") if args.dry_run else None
        config = configuration.load(args.config, args.overrides, stand_in)
        return start(config, run_dir, _command(args.config, run_dir, args.overrides), args.dry_run)
    except KeyboardInterrupt:  # before there was anything to stop
        return EXIT_SIGNAL + signal.SIGINT
    except RunDirectoryBusyError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BUSY
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def start(config: Config, run_dir: Path, command: str, dry_run: bool) -> int:
    """Resolve and check the input, lock and prepare the run directory, run the actors, say how it ended.

    Args:
        config: as loaded.
        run_dir: made where it is not there.
        command: that starts the same run again.
        dry_run: print what would run, and no more.
    """
    topology = plan_topology(config)
    exchange_address(run_dir)
    run_dir = run_dir.absolute()
    if dry_run and (absent := find_absent(config)):
        print(f"{run_dir}\n{describe(topology)}", *(f"  not there yet: {line}" for line in absent), sep="\n")
        return EXIT_DONE
    config = _resolve(config, run_dir)
    _check(config, topology, run_dir)
    print(f"{run_dir}\n{describe(topology)}", flush=True)
    if dry_run:
        return EXIT_DONE
    os.umask(0o077)  # all that the run and its actors write is the owner's alone
    with lock_run_dir(run_dir):
        plan = _prepare(config, run_dir)
        ending, status = _run(config, topology, run_dir)
        _report(ending, status, config, run_dir, plan, command)
    return ending.exit_code


def _resolve(config: Config, run_dir: Path) -> Config:
    return _with_init(_with_paths(config, run_dir))


def _check(config: Config, topology: Topology, run_dir: Path) -> None:
    """Look at all that a person gave, for its errors, before anything is written."""
    _check_model(config)
    check_devices(config)
    if config.data.synthetic is None:
        check_data(config)
    check_run_dir(run_dir, topology.actors)
    memory.check_available(topology.shared_bytes)


def _prepare(config: Config, run_dir: Path) -> Plan:
    """Make the run directory that of this run, as its actors read it, and return the sequence of its batches."""
    check_resume(config, run_dir)
    if config.data.synthetic is not None:
        write_synthetic(config, run_dir / DATA)
    if config.data.skip_damaged:
        _find_damage(config, run_dir)
    data = read_run_data(config, run_dir)
    plan, _ = data.plan(config)
    print(format_plan(plan, *data, config.plan), flush=True)
    configuration.write(config, run_dir)
    report_path(run_dir).unlink(missing_ok=True)
    return plan


def _command(config: Path, run_dir: Path, overrides: list[str]) -> str:
    line = ["python", "-m", "launch.start_all", str(config), "--run-dir", str(run_dir.absolute())]
    return shlex.join([*line, *(["--set", *overrides] if overrides else [])])


def _run(config: Config, topology: Topology, run_dir: Path) -> tuple[Ending, RunStatus]:
    """Run the actors to the end of the last; return what ended the run, and its last state."""
    fds = _create_memory(topology)
    board = Board(fds.board, len(topology.actors))
    table = SlotTable(fds.control, config.num_targets * config.ring.num_slots)
    supervisor = Supervisor(config, topology, fds, board, run_dir)
    pace = Pace(topology, board)
    live, gauges = LiveLine(pace, table), Gauges(run_dir, supervisor, board, table, pace)
    server = ControlServer(run_dir, supervisor, gauges.read)

    def on_tick() -> None:
        pace.observe()
        live.show(supervisor.deaths.counts.total())
        server.serve()

    try:
        ending = _ending(supervisor, supervisor.run(on_tick))
    except Exception as error:
        log.exception("the supervisor failed")
        lines = traceback.format_exc().splitlines()[-_NUM_LAST_LINES:]
        ending = Ending("supervisor failed", EXIT_GAVE_UP, f"{type(error).__name__}: {error}", None, lines)
    finally:
        server.close()
        live.end()
    pace.observe()
    return ending, gauges.read()


def _report(ending: Ending, status: RunStatus, config: Config, run_dir: Path, plan: Plan, command: str) -> None:
    """Write the report and print its essence."""
    try:
        write_report(run_dir, ending, status, plan, config, command)
    except OSError as error:
        log.error("%s: not written: %s", report_path(run_dir), error.strerror)
    _say(ending, run_dir, config.num_drafters, command)


def _ending(supervisor: Supervisor, finished: bool) -> Ending:
    culprit = supervisor.culprit
    if culprit is None:
        if finished:
            return Ending("done", EXIT_DONE)
        return Ending("stopped", EXIT_SIGNAL + supervisor.signum, f"signal {signal.Signals(supervisor.signum).name}")
    name = culprit.spec.name
    if supervisor.is_bad_input:
        return Ending("bad input", EXIT_BAD_INPUT, f"{name}: {last_message(culprit.log)}", name, last_lines(culprit.log, 1))
    return Ending("gave up", EXIT_GAVE_UP, supervisor.failure, name, last_lines(culprit.log, _NUM_LAST_LINES))


def _say(ending: Ending, run_dir: Path, num_drafters: int, command: str) -> None:
    """Input that an actor refused is one line; all else that failed comes with the end of the culprit's log."""
    if ending.cause in ("done", "stopped"):
        show(summarize(run_dir, num_drafters, is_done=ending.cause == "done"))
    if ending.cause == "stopped":
        show(f"stopped; go on with: {command}")
    show(f"report: {report_path(run_dir)}")
    if ending.cause in ("bad input", "gave up"):
        show(f"error: {ending.reason}", stream=sys.stderr)
    if ending.cause == "gave up" and ending.actor:
        show("\n".join(ending.last_lines), stream=sys.stderr)
        show(f"(all of it: {log_path(run_dir, ending.actor)})", stream=sys.stderr)


def _create_memory(topology: Topology) -> SharedFds:
    rings = [memory.create(f"headrace-ring-{index}", topology.ring_bytes) for index in range(topology.num_rings)]
    control = memory.create("headrace-control", topology.table_bytes)
    return SharedFds(rings, control, memory.create("headrace-board", topology.board_bytes))


def _with_paths(config: Config, run_dir: Path) -> Config:
    """Where data and model are, for processes with another working directory; made-up data lie in the run directory."""
    data, model = config.data, config.model
    if data.synthetic is not None:
        data = msgspec.structs.replace(data, path=str(run_dir / DATA / "train"), eval_path=str(run_dir / DATA / "eval"))
    else:
        sets = {name: _absolute(path) for name, path in data.eval_paths.items()}
        single = _absolute(data.eval_path) if data.eval_path else ""
        data = msgspec.structs.replace(data, path=_absolute(data.path), eval_path=single, eval_paths=sets)
    return msgspec.structs.replace(config, data=data, model=msgspec.structs.replace(model, path=_absolute(model.path)))


def _with_init(config: Config) -> Config:
    """Name what is in the drafter to begin from, so that a resumed or restarted run begins from the same."""
    if not config.draft.init:
        return config
    folder = _absolute(config.draft.init)
    draft = msgspec.structs.replace(config.draft, init=folder, init_fingerprint=fingerprint_drafter(Path(folder)))
    return msgspec.structs.replace(config, draft=draft)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _find_damage(config: Config, run_dir: Path) -> None:
    """Say what is damaged, and leave the rows where the exchange looks."""
    held_out = {name: _find_damage_in(path) for name, path in config.data.eval_sets.items()}
    write_damaged_rows(DamagedRows(_find_damage_in(config.data.path), held_out), run_dir)


def _find_damage_in(path: str) -> Ranges:
    damage = find_damage(Path(path))
    for line in damage:
        print(f"damaged: {path}/{line}", flush=True)
    return [span for line in damage for span in line.rows]


def _check_model(config: Config) -> None:
    """The shape was read from config.json already; weights are looked for here, not opened."""
    folder = Path(config.model.path).expanduser()
    if not config.model.random_init and not any(folder.glob("*.safetensors")):
        raise ModelError(f"model.path: needed *.safetensors in {folder}, found none (model.random_init = true needs none)")


if __name__ == "__main__":
    sys.exit(main())
