"""The exchange as a process: one socket, one thread, one message at a time."""

import fcntl
import logging
import os
from pathlib import Path

import zmq

from common.actor import messages
from common.actor.board import Phase
from common.actor.lifecycle import Actor
from common.actor.messages import Refused, Reply
from common.config import Config
from common.errors import ProtocolError, RunDirectoryBusyError
from common.ring.slot_table import SlotTable
from common.run_dir import EXCHANGE_LOCK, exchange_address
from services.exchange.leases import Leases
from services.exchange.router import Outgoing, Router
from services.exchange.samples import read_run_data

_POLL_MS = 100
log = logging.getLogger(__name__)


class ExchangeService:
    """Receives requests, lets the router decide, sends what it decided."""

    def __init__(self, actor: Actor) -> None:
        config = actor.config
        self._actor = actor
        self._lock = _lock(actor.run_dir)
        self._table = SlotTable(actor.args.control_fd, config.num_targets * config.ring.num_slots)
        self._router = _make_router(config, Leases(self._table, config.num_targets))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_REQUEST_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, messages.MAX_WAITING_REQUESTS)
        self._socket.bind(exchange_address(actor.run_dir))

    def run(self) -> None:
        """Serve until told to stop."""
        self._actor.notices.phase(Phase.READY)
        while not self._actor.stopping:
            self._actor.notices.progress()
            if self._socket.poll(_POLL_MS):
                address, *frames = self._socket.recv_multipart()
                for outgoing in self._serve(address, b"".join(frames)):
                    self._socket.send_multipart([outgoing.address, messages.encode(outgoing.reply)])
            self._actor.every(1.0, self._report)
        self._context.destroy(linger=0)

    def _serve(self, address: bytes, data: bytes) -> list[Outgoing]:
        """No message, however wrong, ends the exchange."""
        try:
            return self._router.handle(address, messages.decode_request(data))
        except messages.UNDECODABLE as error:
            log.warning("undecodable message of %d bytes: %s", len(data), error)
            return _refuse(address, data, f"undecodable: {error}")
        except ProtocolError as error:
            log.warning("refused: %s", error)
            return _refuse(address, data, str(error))
        except Exception:
            log.exception("a request failed")
            return _refuse(address, data, "the exchange failed on this request; see its log")

    def _report(self) -> None:
        counts = {state.name.lower(): count for state, count in self._table.counts().items()}
        self._actor.metrics.write(**counts)


def _refuse(address: bytes, data: bytes, reason: str) -> list[Outgoing]:
    """An answer needs the request's id; bytes that carry none get no answer."""
    request_id = messages.find_id(data)
    return [] if request_id is None else [Outgoing(address, Reply(request_id, Refused(reason)))]


def _lock(run_dir: Path) -> int:
    """A second bind on a live ipc path would succeed and steal it: the lock forbids a second exchange."""
    fd = os.open(run_dir / EXCHANGE_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirectoryBusyError(f"{run_dir}: needed no other exchange, found exchange.lock held") from None
    return fd


def _make_router(config: Config, leases: Leases) -> Router:
    plan, name = read_run_data(config.data).plan(config)
    return Router(plan, name, leases, config.num_drafters)


def main(actor: Actor) -> None:
    """The body of `python -m services.exchange`."""
    ExchangeService(actor).run()
