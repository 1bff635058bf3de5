"""`python -m launch.control [RUN] COMMAND`: see and steer a run.

    status [--json]   how it is
    top               the same, live, until Ctrl-C or the end of the run
    restart NAME      end an actor in good order and start it again; loses nothing
    kill NAME         the same by SIGKILL
    stop              as Ctrl-C at start_all: drafters save; a second one ends the run at once
    logs NAME [-f]    what an actor printed; -f: the end of it, and what is still to come
    stack NAME        where an actor is

RUN, the run directory, may be left out where one run of yours is alive. It answers also when actors hang.
Exit codes: 0 done, 1 refused or no answer, 2 no such run.
"""

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import msgspec
import zmq
from rich.console import Console
from rich.live import Live

from common import wire
from common.run_dir import control_path, log_path, report_path
from launch.alive_runs import find_alive_runs
from launch.operate import control_messages
from launch.operate.control_messages import Accepted, GetStatus, Kill, Refused, Reply, Request, Restart, RunStatus, Stop
from launch.operate.dashboard import render
from launch.operate.log_file import follow, last_lines

EXIT_DONE, EXIT_REFUSED, EXIT_NO_RUN = 0, 1, 2
_ANSWER_S = 5.0
_TOP_S = 1.0
_STACK_S = 10.0
_NUM_FOLLOWED_LINES = 20
_WIDTH = 160  # where nobody's terminal sets one


class _NoRunError(Exception):
    """There is no such run, or more than one."""


class _NoAnswerError(Exception):
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
        """Raises _NoAnswerError where the supervisor refuses or is silent."""
        self._socket.send(wire.encode(request))
        if not self._socket.poll(int(_ANSWER_S * 1000)):
            raise _NoAnswerError(f"{self._run_dir}: no answer from its supervisor within {_ANSWER_S:g} s")
        reply = control_messages.decode_reply(self._socket.recv())
        if isinstance(reply, Refused):
            raise _NoAnswerError(reply.reason)
        return reply

    def status(self) -> RunStatus:
        """How the run is."""
        reply = self.ask(GetStatus())
        assert isinstance(reply, RunStatus), reply
        return reply

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(linger=0)


def main(arguments: list[str]) -> int:
    """Parse, find the run, do one thing."""
    args = _parse(arguments)
    try:
        if args.command == "logs":
            return _logs(_find_run(args.run), args.name, args.follow)
        run_dir = _find_run(args.run)
        if not control_path(run_dir).exists():
            raise _NoRunError(f"{run_dir}: needed a run that is alive, found no {control_path(run_dir).name}")
        return _converse(Operator(run_dir), run_dir, args)
    except _NoRunError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NO_RUN
    except _NoAnswerError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_DONE


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.control [RUN]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    args = parser.parse_args(arguments[1:] if names_run else arguments)
    args.run = Path(arguments[0]) if names_run else None
    return args


def _find_run(named: Path | None) -> Path:
    if named is not None:
        if not named.is_dir():
            raise _NoRunError(f"{named}: needed a run directory, found none")
        return named.absolute()
    alive = find_alive_runs()
    if len(alive) != 1:
        listed = "".join(f"\n  {run}" for run in alive)
        raise _NoRunError(f"needed RUN or exactly one run that is alive, found {len(alive)}{listed}")
    return alive[0]


def _converse(operator: Operator, run_dir: Path, args: argparse.Namespace) -> int:
    try:
        match args.command:
            case "status":
                _show(operator.status(), as_json=args.json)
            case "top":
                _top(operator, run_dir)
            case "stack":
                return _stack(operator, run_dir, args.name)
            case _:
                _steer(operator, args)
        return EXIT_DONE
    finally:
        operator.close()


def _steer(operator: Operator, args: argparse.Namespace) -> None:
    request = Stop() if args.command == "stop" else (Restart if args.command == "restart" else Kill)(args.name)
    reply = operator.ask(request)
    assert isinstance(reply, Accepted), reply
    print(reply.what)


def _show(status: RunStatus, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(status).decode())
    else:
        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        console.print(render(status))


def _top(operator: Operator, run_dir: Path) -> None:
    with Live(render(operator.status()), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(_TOP_S)
            try:
                live.update(render(operator.status()), refresh=True)
            except _NoAnswerError:
                if report_path(run_dir).exists():  # it has ended
                    return
                raise


def _logs(run_dir: Path, name: str, following: bool) -> int:
    path = log_path(run_dir, name)
    if not path.exists():
        names = ", ".join(sorted(log.stem for log in path.parent.glob("*.log")))
        raise _NoRunError(f"{path}: needed a log of one of {names or 'no actor yet'}, found none")
    if not following:
        sys.stdout.write(path.read_text(errors="replace"))
        return EXIT_DONE
    position = path.stat().st_size
    print("\n".join(last_lines(path, _NUM_FOLLOWED_LINES)), flush=True)
    for text in follow(path, position):
        sys.stdout.write(text)
        sys.stdout.flush()
    return EXIT_DONE


def _stack(operator: Operator, run_dir: Path, name: str) -> int:
    """By py-spy, which needs the right to trace; else by the actor itself, into its log."""
    actors = {actor.name: actor for actor in operator.status().actors}
    if name not in actors:
        raise _NoAnswerError(f"needed one of {', '.join(actors)}, found {name!r}")
    pid = actors[name].pid
    if pid is None:
        raise _NoAnswerError(f"{name} is down")
    try:
        done = subprocess.run(
            [Path(sysconfig.get_path("scripts")) / "py-spy", "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            check=True,
            timeout=_STACK_S,
        )
        print(done.stdout, end="")
        return EXIT_DONE
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        print(f"py-spy: {reason}; {name} is asked itself", file=sys.stderr)
    return _ask_for_stack(log_path(run_dir, name), pid)


def _ask_for_stack(log: Path, pid: int) -> int:
    position, deadline = log.stat().st_size, time.monotonic() + _ANSWER_S
    os.kill(pid, signal.SIGUSR1)
    seen = ""
    for text in follow(log, position):
        sys.stdout.write(text)
        seen += text
        if (seen and not text) or time.monotonic() > deadline:
            break
    if not seen:
        raise _NoAnswerError(f"nothing appeared in {log} within {_ANSWER_S:g} s: is the process stopped?")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
