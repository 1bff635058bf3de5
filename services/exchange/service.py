"""The exchange as a process: one socket, one thread, one message at a time."""

import fcntl
import logging
import os
from pathlib import Path

import zmq

from common import wire
from common.actor import messages
from common.actor.board import Phase
from common.actor.lifecycle import Actor
from common.actor.messages import Refused, Reply
from common.errors import ProtocolError, RunDirectoryBusyError
from common.ring.slot_table import SlotTable
from common.run_dir import EXCHANGE_LOCK, exchange_address
from services.exchange.leases import Leases
from services.exchange.router import Outgoing, Router
from services.exchange.samples import read_run_data

_POLL_MS = 100
log = logging.getLogger(__name__)


class ExchangeService:
    """Receives requests, lets the router decide, and sends its replies."""

    def __init__(self, actor: Actor) -> None:
        config = actor.config
        self._actor = actor
        self._lock = _lock(actor.run_dir)
        self._table = SlotTable(actor.args.control_fd, config.num_targets * config.ring.num_slots)
        plan, plan_hash = read_run_data(config.data).plan(config)
        self._router = Router(plan, plan_hash, Leases(self._table, config.num_targets), config.num_drafters)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, wire.MAX_WAITING_FRAMES)
        self._socket.bind(exchange_address(actor.run_dir))

    def run(self) -> None:
        self._actor.notices.phase(Phase.READY)
        while not self._actor.stopping:
            self._actor.notices.progress()
            if self._socket.poll(_POLL_MS):
                address, *frames = self._socket.recv_multipart()
                for outgoing in self._serve(address, b"".join(frames)):
                    self._socket.send_multipart([outgoing.address, wire.encode(outgoing.reply)])
            self._actor.every(1.0, self._report)
        self._context.destroy(linger=0)

    def _serve(self, address: bytes, data: bytes) -> list[Outgoing]:
        """Answer one message; no message, however wrong, ends the exchange."""
        try:
            return self._router.handle(address, messages.decode_request(data))
        except ProtocolError as error:
            reason = str(error)
            log.warning("refused: %s", reason)
        except Exception:
            reason = "the exchange failed on this request; see its log"
            log.exception("a request failed")
        request_id = messages.find_id(data)  # bytes that carry none get no answer
        return [] if request_id is None else [Outgoing(address, Reply(request_id, Refused(reason)))]

    def _report(self) -> None:
        self._actor.metrics.write(**{state.name.lower(): count for state, count in self._table.counts().items()})


def _lock(run_dir: Path) -> int:
    """Lock out a second exchange: its bind on the same ipc path would succeed and take the path over."""
    fd = os.open(run_dir / EXCHANGE_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirectoryBusyError(f"{run_dir}: needed no other exchange, found exchange.lock held") from None
    return fd


def main(actor: Actor) -> None:
    ExchangeService(actor).run()
