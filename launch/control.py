"""See and steer a run: `python -m launch.control [RUN] COMMAND`. It answers also when actors hang.

    status [--json]   the state of the run
    top               the same, live, until Ctrl-C or the end of the run
    restart NAME      end an actor in good order and start it again; loses nothing
    kill NAME         the same by SIGKILL
    stop              as Ctrl-C at start_all: drafters save; a second one ends the run at once
    logs NAME [-f]    the output of an actor; -f: the end of it, and new lines as they come
    stack NAME        the stack of every thread of an actor, which also go to its log

RUN, the run directory, may be left out where exactly one run in ./runs is alive.
Exit codes: 0 done, 1 refused or no answer, 2 no such run.
"""

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec
import zmq
from rich.console import Console
from rich.live import Live

from common import wire
from common.errors import HeadraceError
from common.run_dir import control_path, log_path, report_path
from launch.arguments import EXIT_DONE, EXIT_FAILED, make_parser, run_command
from launch.operate import control_messages
from launch.operate.control_messages import Accepted, GetStatus, Kill, Refused, Reply, Request, Restart, RunStatus, Stop
from launch.operate.dashboard import render
from launch.operate.log_file import follow, last_lines

RUNS = Path("runs")  # where start_all puts a run without --run-dir
_ANSWER_S = 5.0
_TOP_S = 1.0
_NUM_FOLLOWED_LINES = 20
_WIDTH = 160  # where the output is no terminal


class NoRunError(HeadraceError):
    """No such run, or more than one."""


class NoAnswerError(HeadraceError):
    """The supervisor refused, or did not answer."""


class Operator:
    """A conversation with the supervisor of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{control_path(run_dir)}")

    def ask(self, request: Request) -> Reply:
        """Return the answer; NoAnswerError where the supervisor refuses or is silent."""
        self._socket.send(wire.encode(request))
        if not self._socket.poll(int(_ANSWER_S * 1000)):
            raise NoAnswerError(f"{self._run_dir}: no answer from its supervisor within {_ANSWER_S:g} s")
        reply = control_messages.decode_reply(self._socket.recv())
        if isinstance(reply, Refused):
            raise NoAnswerError(reply.reason)
        return reply

    def status(self) -> RunStatus:
        """Return the state of the run."""
        reply = self.ask(GetStatus())
        assert isinstance(reply, RunStatus), reply
        return reply

    def close(self) -> None:
        """End the conversation."""
        self._context.destroy(linger=0)


def control(options: argparse.Namespace) -> int:
    """Find the run and do one thing."""
    if options.command == "logs":
        _logs(_find_run(options.run), options.name, options.follow)
        return EXIT_DONE
    run_dir = _find_run(options.run)
    if not is_alive(run_dir):
        raise NoRunError(f"{run_dir}: needed a run that is alive, found nobody at {control_path(run_dir).name}")
    operator = Operator(run_dir)
    try:
        _converse(operator, run_dir, options)
    except NoAnswerError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        operator.close()
    return EXIT_DONE


def is_alive(run_dir: Path) -> bool:
    """Return whether the supervisor of a run takes connections; a socket left by a killed one does not."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(control_path(run_dir)))
        except OSError:
            return False
    return True


def _find_run(named: Path | None) -> Path:
    if named is not None:
        if not named.is_dir():
            raise NoRunError(f"{named}: needed a run directory, found none")
        return named.absolute()
    alive = sorted(path.parent.absolute() for path in RUNS.glob("*/control.sock") if is_alive(path.parent))
    if len(alive) != 1:
        listed = "".join(f"\n  {run}" for run in alive)
        raise NoRunError(f"needed RUN or exactly one run that is alive in {RUNS}, found {len(alive)}{listed}")
    return alive[0]


def _converse(operator: Operator, run_dir: Path, options: argparse.Namespace) -> None:
    match options.command:
        case "status":
            _show(operator.status(), as_json=options.json)
        case "top":
            _top(operator, run_dir)
        case "stack":
            _stack(operator, run_dir, options.name)
        case "stop":
            _steer(operator, Stop())
        case "restart":
            _steer(operator, Restart(options.name))
        case "kill":
            _steer(operator, Kill(options.name))


def _steer(operator: Operator, request: Request) -> None:
    reply = operator.ask(request)
    assert isinstance(reply, Accepted), reply
    print(reply.what)


def _show(status: RunStatus, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(status).decode())
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(render(status))


def _top(operator: Operator, run_dir: Path) -> None:
    """Show the state every second, until Ctrl-C or the end of the run."""
    try:
        with Live(render(operator.status()), auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(_TOP_S)
                live.update(render(operator.status()), refresh=True)
    except KeyboardInterrupt:
        return
    except NoAnswerError:
        if not report_path(run_dir).exists():  # written when the run has ended
            raise


def _logs(run_dir: Path, name: str, is_followed: bool) -> None:
    path = log_path(run_dir, name)
    if not path.exists():
        names = ", ".join(sorted(log.stem for log in path.parent.glob("*.log")))
        raise NoRunError(f"{path}: needed a log of one of {names or 'no actor yet'}, found none")
    if not is_followed:
        sys.stdout.write(path.read_text(errors="replace"))
        return
    position = path.stat().st_size
    print("\n".join(last_lines(path, _NUM_FOLLOWED_LINES)), flush=True)
    try:
        for text in follow(path, position):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        return


def _stack(operator: Operator, run_dir: Path, name: str) -> None:
    """Let an actor write its stacks to its log (common/actor/lifecycle.py), and print them from there."""
    pids = {actor.name: actor.pid for actor in operator.status().actors}
    if name not in pids:
        raise NoAnswerError(f"needed one of {', '.join(pids)}, found {name!r}")
    pid, log = pids[name], log_path(run_dir, name)
    if pid is None:
        raise NoAnswerError(f"{name} is down")
    position, deadline = log.stat().st_size, time.monotonic() + _ANSWER_S
    os.kill(pid, signal.SIGUSR1)
    seen = ""
    for text in follow(log, position):
        print(text, end="")
        seen += text
        if (seen and not text) or time.monotonic() > deadline:
            break
    if not seen:
        raise NoAnswerError(f"{name} wrote nothing to {log} within {_ANSWER_S:g} s: it starts, or is stopped by a signal")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("control [RUN]", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("status").add_argument("--json", action="store_true", help="one JSON object")
    commands.add_parser("top")
    commands.add_parser("stop")
    for name in ("restart", "kill", "stack"):
        commands.add_parser(name).add_argument("name", metavar="NAME")
    logs = commands.add_parser("logs")
    logs.add_argument("name", metavar="NAME")
    logs.add_argument("-f", dest="follow", action="store_true")
    names_run = bool(arguments) and not arguments[0].startswith("-") and arguments[0] not in commands.choices
    options = parser.parse_args(arguments[1:] if names_run else arguments)
    options.run = Path(arguments[0]) if names_run else None
    return options


def main(argv: list[str] | None = None) -> int:
    """Read the command line and do one thing."""
    return run_command(control, _parse(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
