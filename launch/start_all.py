"""Start, watch and end a whole run: `python -m launch.start_all CONFIG`. Loads no torch.

Exit codes: 0 done, 1 an actor gave up, 2 bad configuration or input, 3 the run directory is busy,
128 + n ended early by signal n (start the same command again to go on).
"""

import argparse
import logging
import os
import shlex
import sys
import time
from pathlib import Path

from common import config as configuration
from common.config import Config
from common.ring import memory
from common.run_dir import DATA, exchange_address, log_path, report_path
from launch.arguments import EXIT_DONE, make_parser, run_command
from launch.data.synthetic import write_synthetic
from launch.operate.control_messages import RunStatus
from launch.operate.dashboard import show
from launch.operate.plan_table import format_plan
from launch.operate.report import Ending, summarize, write_report
from launch.operate.run import run
from launch.operate.run_config import check_input, find_absent, read_gpus, resolve
from launch.operate.run_directory import check_resume, check_run_dir, lock_run_dir
from launch.operate.topology import Topology, describe, describe_gpus, plan_topology
from services.exchange.plan import Plan
from services.exchange.samples import read_run_data

log = logging.getLogger(__name__)


def start(options: argparse.Namespace) -> int:
    """Resolve, check, lock, prepare, run, report: one function each. A dry run ends before anything is written."""
    given, run_dir = _load(options)
    topology = plan_topology(given)
    gpus = describe_gpus(topology, read_gpus()) if options.dry_run else ""
    if options.dry_run and (absent := find_absent(given)):
        print(f"{run_dir}\n{describe(topology)}{gpus}", *(f"  not there yet: {line}" for line in absent), sep="\n")
        return EXIT_DONE
    config = resolve(given, run_dir)
    check(config, topology, run_dir)
    print(f"{run_dir}\n{describe(topology)}{gpus}", flush=True)
    if options.dry_run:
        return EXIT_DONE
    os.umask(0o077)  # all files of the run and its actors are the owner's alone
    with lock_run_dir(run_dir):
        plan = prepare(config, run_dir)
        ending, status = run(config, topology, run_dir)
        report(ending, status, config, run_dir, plan, _command(options, run_dir))
    return ending.exit_code


def check(config: Config, topology: Topology, run_dir: Path) -> None:
    """Check all input for errors before anything is written."""
    check_input(config)
    check_run_dir(run_dir, topology.actors)
    memory.check_available(topology.shared_bytes)


def prepare(config: Config, run_dir: Path) -> Plan:
    """Write the files that the actors read into the run directory, print and return the plan of the batches."""
    check_resume(config, run_dir)
    if config.data.synthetic is not None:
        write_synthetic(config, run_dir / DATA)
    data = read_run_data(config.data)
    plan, _ = data.plan(config)
    print(format_plan(plan, *data, config.plan), flush=True)
    configuration.write(config, run_dir)
    report_path(run_dir).unlink(missing_ok=True)
    return plan


def report(ending: Ending, status: RunStatus, config: Config, run_dir: Path, plan: Plan, command: str) -> None:
    """Write report.json and print its essence: refused input in one line, other failures with the end of a log."""
    try:
        write_report(run_dir, ending, status, plan, config, command)
    except OSError as error:
        log.error("%s: not written: %s", report_path(run_dir), error.strerror)
    if ending.cause in ("done", "stopped"):
        show(summarize(run_dir, config.num_drafters, is_done=ending.cause == "done"))
    if ending.cause == "stopped":
        show(f"stopped; go on with: {command}")
    show(f"report: {report_path(run_dir)}")
    if ending.cause in ("bad input", "gave up"):
        show(f"error: {ending.reason}", stream=sys.stderr)
    if ending.cause == "gave up" and ending.actor:
        show("\n".join(ending.last_lines), stream=sys.stderr)
        show(f"(all of it: {log_path(run_dir, ending.actor)})", stream=sys.stderr)


def _load(options: argparse.Namespace) -> tuple[Config, Path]:
    """Read the configuration and name the run directory."""
    path: Path = options.config
    stand_in = path.with_name(f"{path.stem.removesuffix('_dflash2')}_target") if options.dry_run else None
    config = configuration.load(path, options.overrides, stand_in, options.run_dir)
    run_dir: Path = options.run_dir or Path("runs") / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    exchange_address(run_dir)  # checks the length of the path
    return config, run_dir.absolute()


def _command(options: argparse.Namespace, run_dir: Path) -> str:
    line = ["python", "-m", "launch.start_all", str(options.config), "--run-dir", str(run_dir)]
    return shlex.join([*line, *(["--set", *options.overrides] if options.overrides else [])])


def main(argv: list[str] | None = None) -> int:
    """Read the command line and start the run."""
    parser = make_parser("start_all", __doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    parser.add_argument("--run-dir", type=Path, help="default runs/<config>-<time>; an earlier run's directory is resumed")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="print the processes and their memory, start nothing")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_command(start, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
