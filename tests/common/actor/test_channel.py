"""Asking over real sockets that die, double, refuse and talk nonsense."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import zmq

from common import wire
from common.actor import messages
from common.actor.channel import Channel, ChannelClosedError
from common.actor.messages import Done, Incarnation, Next, Refused, Release, Reply, ReplyBody, Request, Stale
from common.errors import ProtocolError

SENDER = Incarnation("drafter", 0, 1, 1)
WAIT_S = 20  # a hung test ends; nothing is asserted of time


class Exchange:
    """The other end, in the test's hands."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)

    def receive(self) -> tuple[bytes, Request]:
        assert self.socket.poll(WAIT_S * 1000), "no request came"
        identity, data = self.socket.recv_multipart()
        return identity, messages.decode_request(data)

    def receive_id(self, request_id: int) -> bytes:
        """Skip to a request of that id; the address it came from."""
        while True:
            identity, request = self.receive()
            if request.id == request_id:
                return identity

    def answer(self, identity: bytes, request_id: int, body: ReplyBody) -> None:
        self.socket.send_multipart([identity, wire.encode(Reply(request_id, body))])

    def die(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/exchange.sock"


@pytest.fixture
def exchange(address: str) -> Iterator[Exchange]:
    exchange = Exchange(address)
    yield exchange
    exchange.die()


@pytest.fixture
def channel(address: str) -> Iterator[Channel]:
    channel = Channel(address, SENDER)
    yield channel
    channel.close()


def result(answer: "Future[ReplyBody]") -> ReplyBody:
    return answer.result(timeout=WAIT_S)


def test_a_request_is_sent_again_until_it_is_answered(exchange: Exchange, channel: Channel) -> None:
    answer = channel.request(Next(4))
    received = [exchange.receive() for _ in range(3)]
    assert [request for _, request in received] == [Request(1, SENDER, Next(4))] * 3
    exchange.answer(received[0][0], 1, Done())
    assert result(answer) == Done()
    following = channel.request(Next(5))
    identity = exchange.receive_id(2)
    exchange.answer(identity, 2, Stale())
    assert result(following) == Stale()


def test_a_doubled_answer_is_ignored(exchange: Exchange, channel: Channel) -> None:
    first = channel.request(Next(4))
    identity, _ = exchange.receive()
    for body in (Done(), Stale(), Done()):
        exchange.answer(identity, 1, body)
    assert result(first) == Done()
    second = channel.request(Next(5))
    exchange.answer(identity, 1, Stale())
    exchange.answer(identity, 99, Stale())
    exchange.receive_id(2)
    exchange.answer(identity, 2, Done())
    assert result(second) == Done()


def test_answers_go_to_their_requests_in_any_order(exchange: Exchange, channel: Channel) -> None:
    answers = [channel.request(Next(batch)) for batch in range(5)]
    waiting: dict[int, bytes] = {}
    while len(waiting) < 5:
        identity, request = exchange.receive()
        waiting[request.id] = identity
    for request_id in (3, 5, 1, 4, 2):
        exchange.answer(waiting[request_id], request_id, Refused(str(request_id)) if request_id == 4 else Done())
    assert [result(answer) for answer in answers[:3]] == [Done()] * 3
    with pytest.raises(ProtocolError, match=r"^4$"):
        result(answers[3])


def test_an_exchange_may_come_after_its_actor(address: str, channel: Channel) -> None:
    answer = channel.request(Next(4))
    assert not answer.done()
    exchange = Exchange(address)
    identity, request = exchange.receive()
    exchange.answer(identity, request.id, Done())
    assert result(answer) == Done()
    exchange.die()


def test_an_exchange_that_dies_comes_back_under_the_same_address(address: str, channel: Channel) -> None:
    answers = []
    for number in range(3):
        exchange = Exchange(address)
        answers.append(channel.request(Next(number)))
        exchange.receive_id(number + 1)  # dies with the requests in its hands
        exchange.die()
    exchange = Exchange(address)
    for request_id in (3, 1, 2):
        exchange.answer(exchange.receive_id(request_id), request_id, Done())
    assert [result(answer) for answer in answers] == [Done()] * 3
    exchange.die()


def test_refused_is_an_error_that_says_why(exchange: Exchange, channel: Channel) -> None:
    answer = channel.request(Release(0, 1, intact=True))
    identity, request = exchange.receive()
    exchange.answer(identity, request.id, Refused("slot: needed 0 to 3, found 9"))
    with pytest.raises(ProtocolError, match="slot: needed 0 to 3, found 9"):
        result(answer)


def test_an_answer_that_cannot_be_read_is_an_error_of_its_request(exchange: Exchange, channel: Channel) -> None:
    spoilt, fine = channel.request(Next(1)), channel.request(Next(2))
    identity = exchange.receive_id(2)
    exchange.socket.send_multipart([identity, wire.encode({"id": 1, "body": {"type": "Invented"}})])
    with pytest.raises(ProtocolError, match=r"answer: undecodable message of .*Invented"):
        result(spoilt)
    exchange.answer(identity, 2, Done())
    assert result(fine) == Done()


@pytest.mark.parametrize("nonsense", [b"", b"\xc1", b"not msgpack", b"\x91" * 100_000, wire.encode({"id": None})])
def test_nonsense_is_no_answer(exchange: Exchange, channel: Channel, nonsense: bytes) -> None:
    answer = channel.request(Next(1))
    identity, _ = exchange.receive()
    exchange.socket.send_multipart([identity, nonsense])
    exchange.answer(identity, 1, Done())
    assert result(answer) == Done()


def test_close_ends_every_wait(address: str) -> None:
    channel = Channel(address, SENDER)
    answers = [channel.request(Next(batch)) for batch in range(3)]
    channel.close()
    for answer in answers:
        with pytest.raises(ChannelClosedError):
            result(answer)
    with pytest.raises(ChannelClosedError):
        channel.request(Next(3))
    channel.close()


def test_close_returns_where_its_thread_has_already_left(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(address, SENDER)
    channel.request(Next(0))  # while a request waits the thread looks around by itself

    class SeenAtOnce(threading.Event):
        """An event that is seen by the thread, which ends, before close() takes its next step."""

        def set(self) -> None:
            super().set()
            channel._thread.join(WAIT_S)
            time.sleep(0.2)  # until ZeroMQ has taken its sockets apart, too

    monkeypatch.setattr(channel, "_closing", SeenAtOnce())
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_thread_that_waits_is_woken_by_close(exchange: Exchange, address: str) -> None:
    channel = Channel(address, SENDER)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            channel.ask(Next(0), lambda: True)
        except ChannelClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    exchange.receive()
    channel.close()
    thread.join(WAIT_S)
    assert len(errors) == 1


def test_a_wait_lasts_as_long_as_its_owner_likes(exchange: Exchange, channel: Channel) -> None:
    turns = iter([True, True, False])
    with pytest.raises(ChannelClosedError):
        channel.ask(Next(0), lambda: next(turns))
    assert list(turns) == []


def test_ask_returns_the_answer(exchange: Exchange, channel: Channel) -> None:
    served = threading.Thread(target=lambda: exchange.answer(exchange.receive()[0], 1, Done()))
    served.start()
    assert channel.ask(Next(0), lambda: True) == Done()
    served.join(WAIT_S)


def test_many_threads_may_ask_at_once(exchange: Exchange, channel: Channel) -> None:
    answers: list[ReplyBody] = []

    def ask() -> None:
        answers.extend(channel.ask(Next(batch), lambda: True) for batch in range(20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    answered: set[int] = set()
    while len(answered) < 80:
        identity, request = exchange.receive()
        exchange.answer(identity, request.id, Done())
        answered.add(request.id)
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == [Done()] * 80


def test_a_channel_that_cannot_work_says_so_to_whoever_asks() -> None:
    channel = Channel("nowhere://at all", SENDER)
    with pytest.raises(zmq.ZMQError):
        channel.ask(Next(0), lambda: True)
    with pytest.raises(zmq.ZMQError):
        channel.request(Next(1))
    channel.close()
