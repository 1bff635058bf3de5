"""An actor's requests to the exchange and their replies, whatever dies in between.

ZeroMQ loses what a dead peer had buffered, so sending is never delivery: a request is sent again until its reply
arrives. One thread owns the socket; any thread may send requests.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

import zmq

from common import wire
from common.actor import messages
from common.actor.messages import Incarnation, Refused, Reply, ReplyBody, Request, RequestBody
from common.errors import ProtocolError

RESEND_S = 0.1
log = logging.getLogger(__name__)


class ChannelClosedError(Exception):
    """The channel was closed, or its owner stopped, before the reply arrived."""


class _Pending:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.answer: Future[ReplyBody] = Future()
        self.due = 0.0


class Channel:
    """A DEALER socket to the exchange and the requests without a reply."""

    def __init__(self, address: str, sender: Incarnation) -> None:
        self._sender = sender
        self._ids = itertools.count(1)
        self._new: SimpleQueue[tuple[int, _Pending]] = SimpleQueue()
        self._closing = threading.Event()
        self._failure: BaseException | None = None  # what ended the thread before close()
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # a write never waits for the thread, even if it has ended
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._carry, args=(address,), name="channel", daemon=True)
        self._thread.start()

    def request(self, body: RequestBody) -> "Future[ReplyBody]":
        """Send a request without waiting; the future holds the reply, or ProtocolError if it was refused."""
        request_id = next(self._ids)
        pending = _Pending(wire.encode(Request(request_id, self._sender, body)))
        with self._wake_lock:
            if self._closing.is_set():
                raise ChannelClosedError
            if self._failure is not None:
                raise self._failure
            self._new.put((request_id, pending))
            os.eventfd_write(self._wake, 1)
        return pending.answer

    def ask(self, body: RequestBody, keep_waiting: Callable[[], bool]) -> ReplyBody:
        """Send a request and wait; `keep_waiting` is called some ten times a second and ends the wait by False."""
        answer = self.request(body)
        while True:
            try:
                return answer.result(timeout=RESEND_S)
            except TimeoutError:
                if not keep_waiting():
                    answer.cancel()  # so it is not sent again
                    raise ChannelClosedError from None

    def close(self) -> None:
        """Close the socket; a thread that still waits gets ChannelClosedError."""
        with self._wake_lock:
            if self._closing.is_set():
                return
            self._closing.set()
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._context.term()

    def _carry(self, address: str) -> None:
        pending: dict[int, _Pending] = {}
        with self._context.socket(zmq.DEALER) as socket:
            try:
                _connect(socket, address)
                self._serve(socket, pending)
            except BaseException as error:
                log.exception("the channel failed")
                with self._wake_lock:
                    self._failure = error
        for _, waiting in [*pending.items(), *_drain(self._new)]:
            if waiting.answer.set_running_or_notify_cancel():
                waiting.answer.set_exception(self._failure or ChannelClosedError())

    def _serve(self, socket: "zmq.Socket[bytes]", pending: dict[int, _Pending]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(int(RESEND_S * 1000) if pending else None))
            if self._wake in ready:
                os.eventfd_read(self._wake)  # before the queue is emptied, so that no request stays unseen
                pending.update(_drain(self._new))
            if socket in ready:
                _take_answers(socket, pending)
            _send_due(socket, pending)


def _connect(socket: "zmq.Socket[bytes]", address: str) -> None:
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
    socket.connect(address)


def _drain(queue: "SimpleQueue[tuple[int, _Pending]]") -> list[tuple[int, _Pending]]:
    items = []
    with suppress(Empty):
        while True:
            items.append(queue.get_nowait())
    return items


def _take_answers(socket: "zmq.Socket[bytes]", pending: dict[int, _Pending]) -> None:
    while socket.poll(0):
        reply = _decode(socket.recv())
        waiting = None if reply is None else pending.pop(reply.id, None)
        if reply is None or waiting is None or not waiting.answer.set_running_or_notify_cancel():
            continue  # a second reply to a request that was sent twice, or no thread waits for it any more
        if isinstance(reply.body, Refused):
            waiting.answer.set_exception(ProtocolError(reply.body.reason))
        else:
            waiting.answer.set_result(reply.body)


def _decode(data: bytes) -> Reply | None:
    """Return the reply in `data`; a refusal if only its id is readable, None if it has no id."""
    try:
        return messages.decode_reply(data)
    except ProtocolError as error:
        log.warning("answer: %s", error)
        request_id = messages.find_id(data)
        return None if request_id is None else Reply(request_id, Refused(f"answer: {error}"))


def _send_due(socket: "zmq.Socket[bytes]", pending: dict[int, _Pending]) -> None:
    now = time.monotonic()
    for request_id in [request_id for request_id, waiting in pending.items() if waiting.answer.cancelled()]:
        del pending[request_id]
    for waiting in pending.values():
        if waiting.due > now:
            continue
        try:
            socket.send(waiting.data, zmq.NOBLOCK)
        except zmq.Again:
            return  # no exchange; the next round tries again
        waiting.due = now + RESEND_S
