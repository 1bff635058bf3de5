"""Every message goes over the wire and comes back as it was."""

import random
from typing import get_args

import pytest

from common import wire
from common.actor import messages
from common.actor.messages import (
    PROTOCOL_VERSION,
    ActorDied,
    BatchInfo,
    Done,
    Finished,
    Grant,
    Held,
    Hello,
    Incarnation,
    Lease,
    Next,
    NoBatch,
    Refused,
    Release,
    Reply,
    ReplyBody,
    Request,
    RequestBody,
    SlotReady,
    Stale,
    Welcome,
    Work,
)
from common.errors import ProtocolError

SENDER = Incarnation("target", 2, 4711, 2**40)
INFO = BatchInfo(2**33, "eval", 5, 1000, closes=True)
REQUESTS: list[RequestBody] = [
    Hello(PROTOCOL_VERSION),
    Work([Held(3, 2**40), Held(4, 1)]),
    SlotReady(3, 2**40),
    Next(2**33),
    Release(3, 1, intact=False),
    ActorDied(4711, 2**40),
]
REPLIES: list[ReplyBody] = [
    Welcome(bytes(range(16)), 10, 4),
    Lease(1, 2, INFO, [2**40, 0]),
    Grant(1, 2, INFO),
    NoBatch(INFO),
    Finished(),
    Done(),
    Stale(),
    Refused("because"),
]


@pytest.mark.parametrize("body", REQUESTS, ids=lambda body: type(body).__name__)
def test_a_request_comes_back(body: RequestBody) -> None:
    request = Request(7, SENDER, body)
    assert messages.decode_request(wire.encode(request)) == request


@pytest.mark.parametrize("body", REPLIES, ids=lambda body: type(body).__name__)
def test_a_reply_comes_back(body: ReplyBody) -> None:
    reply = Reply(2**40, body)
    assert messages.decode_reply(wire.encode(reply)) == reply


def test_no_message_is_missing_from_the_lists() -> None:
    assert {type(body) for body in REQUESTS} == set(get_args(RequestBody))
    assert {type(body) for body in REPLIES} == set(get_args(ReplyBody))


@pytest.mark.parametrize("pid", [-1, 2**63])
def test_a_sender_that_fits_no_slot_record_is_refused(pid: int) -> None:
    with pytest.raises(ProtocolError):
        messages.decode_request(wire.encode(Request(1, Incarnation("drafter", 0, pid, 1), Next(0))))


def test_a_request_is_no_reply_and_a_reply_no_request() -> None:
    with pytest.raises(ProtocolError):
        messages.decode_reply(wire.encode(Request(1, SENDER, Hello(PROTOCOL_VERSION))))
    with pytest.raises(ProtocolError):
        messages.decode_request(wire.encode(Reply(1, Done())))


def test_an_id_is_found_where_the_rest_is_wrong() -> None:
    assert messages.find_id(wire.encode({"id": 12, "body": {"type": "Unknown"}})) == 12
    assert messages.find_id(b"") is None
    assert messages.find_id(wire.encode({"id": "twelve"})) is None
    assert messages.find_id(wire.encode([12])) is None


def test_arbitrary_bytes_raise_nothing_but_what_is_caught() -> None:
    rng = random.Random(1)
    whole = wire.encode(Request(1, SENDER, REQUESTS[1]))
    deep = [b"\x91" * 100_000, b"\x82\xa2id\x01\xa4body" + b"\x91" * 100_000]
    changed = [bytearray(whole) for _ in range(5000)]
    for buffer in changed:
        for _ in range(rng.randint(1, 5)):
            buffer[rng.randrange(len(buffer))] = rng.randrange(256)
    for data in [*deep, *map(bytes, changed), *(rng.randbytes(rng.randrange(50)) for _ in range(5000))]:
        for decode in (messages.decode_request, messages.decode_reply):
            try:
                decode(data)
            except ProtocolError:
                continue
        messages.find_id(data)
