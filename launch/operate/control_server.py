"""The operator's way to the supervisor: one socket in the run directory, polled in every tick, never waited for."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import zmq

from common import wire
from common.errors import ProtocolError
from common.run_dir import control_path
from launch.operate import control_messages
from launch.operate.actor_state import State
from launch.operate.control_messages import Accepted, GetStatus, Kill, Refused, Reply, Request, Restart, RunStatus, Stop
from launch.operate.supervisor import Supervisor

log = logging.getLogger(__name__)


class ControlServer:
    """Answers every request; no message, however wrong, ends the run."""

    def __init__(self, run_dir: Path, supervisor: Supervisor, read_status: Callable[[], RunStatus]) -> None:
        self._supervisor = supervisor
        self._read_status = read_status
        self._path = control_path(run_dir)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 100)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, wire.MAX_WAITING_FRAMES)
        self._socket.bind(f"ipc://{self._path}")
        self._path.chmod(0o600)

    def serve(self) -> None:
        """Answer the requests that have arrived."""
        while self._socket.poll(0):
            address, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            reply = self._answer(b"".join(frames))
            self._socket.send_multipart([address, wire.encode(reply)])  # a ROUTER drops it where nobody takes it

    def close(self) -> None:
        """Send the answers that are left and remove the socket."""
        self._context.destroy(linger=100)
        self._path.unlink(missing_ok=True)

    def _answer(self, data: bytes) -> Reply:
        try:
            return self._act(control_messages.decode_request(data))
        except ProtocolError as error:
            return Refused(f"needed a message of launch/operate/control_messages.py: {error}")

    def _act(self, request: Request) -> Reply:
        match request:
            case GetStatus():
                return self._read_status()
            case Stop():
                self._supervisor.stop()
                return Accepted("the run is being stopped")
            case Restart(name):
                return self._replace(name, gently=True)
            case Kill(name):
                return self._replace(name, gently=False)
        assert_never(request)

    def _replace(self, name: str, *, gently: bool) -> Reply:
        children = {child.spec.name: child for child in self._supervisor.children}
        if name not in children:
            return Refused(f"needed one of {', '.join(children)}, found {name!r}")
        child = children[name]
        if self._supervisor.is_stopping:
            return Refused("the run is being stopped")
        if child.state == State.DONE:
            return Refused(f"{name} has come to the end of the training")
        log.warning("an operator %s %s", "restarts" if gently else "kills", name)
        found = f"(pid {child.pid}) is being {'ended' if gently else 'killed'}" if child.alive else "is down"
        self._supervisor.replace(child, gently=gently)
        return Accepted(f"{name} {found}; it starts again at once")
