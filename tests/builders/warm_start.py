"""Start `launch.start_all`, a bench command, and their actors as forks of a process that has done their imports.

Imports are most of a short run: a target needs seconds for them. Everything after the imports is real: processes, sessions,
signals, descriptors, shared memory. The runs that other runs are compared with (`reference`, `small_reference`) start cold,
as does the demo.

    pytest -> fork server, one for the session -> start_all -> its actors
                                               -> bench command -> start_all -> its actors
"""

import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any, NoReturn

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.builders.warm_imports", "tests.builders.process_run"])
_popen: Callable[..., Any] = subprocess.Popen
_STANDARD = (0, 1, 2)


class WarmProcess:
    """A `start_all`, or another module that starts actors, with the methods of `subprocess.Popen` that the tests need."""

    def __init__(self, arguments: list[str], cwd: Path, stdout: Path, stderr: Path, module: str = "launch.start_all") -> None:
        ignored = [signum for signum in signal.Signals if signal.getsignal(signum) == signal.SIG_IGN]
        needed = module, arguments, cwd, stdout.absolute(), stderr.absolute(), ignored
        self._process: ForkServerProcess = FORKS.Process(target=_run_supervisor, args=needed)
        self._process.start()
        self._module = module
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int:
        assert self._process.exitcode is not None
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._module, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _ForkedActor:
    """An actor or a `start_all` with the methods of `subprocess.Popen` that its parent needs."""

    def __init__(
        self, line: list[str], stdout: IO[bytes], cwd: Path, env: Mapping[str, str], pass_fds: Collection[int]
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()  # or the child would print it again
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            environment = dict(env)
            os.environ.clear()
            os.environ.update(environment)
            _redirect(stdout.fileno(), stdout.fileno())
            _close_all_but({*_STANDARD, *pass_fds})
            _run_module(line[2], line[3:], cwd)

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._reap(os.WNOHANG)

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is None
        code = self.returncode if self.returncode is not None else self._reap(0)
        assert code is not None
        return code

    def _reap(self, options: int) -> int | None:
        pid, status = os.waitpid(self.pid, options)
        if pid == self.pid:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _start_process(line: list[str], **options: Any) -> Any:
    """Fork for an actor or a `start_all`; start every other command as before."""
    if line[1:2] != ["-m"] or not line[2].startswith(("services.", "launch.start_all")):
        return _popen(line, **options)
    return _ForkedActor(line, options["stdout"], options["cwd"], options.get("env", os.environ), options.get("pass_fds", ()))


def _run_supervisor(
    module: str, arguments: list[str], cwd: Path, stdout: Path, stderr: Path, ignored: list[signal.Signals]
) -> NoReturn:
    """Run as the new process: take the place of `python -m module` that was started with these output files."""
    _redirect(*(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in (stdout, stderr)))
    subprocess.Popen = _start_process  # type: ignore[misc, assignment]
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    _run_module(module, arguments, cwd)


def _redirect(stdout: int, stderr: int) -> None:
    for number, source in zip(_STANDARD, (os.open(os.devnull, os.O_RDONLY), stdout, stderr), strict=True):
        os.dup2(source, number)


def _close_all_but(kept: set[int]) -> None:
    for number in sorted({int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - kept):
        try:
            os.close(number)
        except OSError:
            continue  # the descriptor of the listing itself


def _run_module(module: str, arguments: list[str], cwd: Path) -> NoReturn:
    """Do what `python -m module` does in a new process, and leave the process."""
    code: Any = 1
    try:
        for signum in signal.Signals:
            if callable(signal.getsignal(signum)):  # an exec would forget the handlers of the parent
                signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        logging.root.handlers.clear()
        sys.modules.pop("launch.start_all", None)  # or runpy warns that it is imported already
        os.chdir(cwd)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)
