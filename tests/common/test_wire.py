"""The codec takes no memory for what a frame only announces, and raises one error for bytes that are no message."""

import tracemalloc

import msgpack
import pytest

from common import wire
from common.actor.messages import BatchInfo, Held, Incarnation, Lease, Reply, Request, Work, decode_reply, decode_request
from common.errors import ProtocolError

ANNOUNCED = (1 << 31).to_bytes(4, "big")
FRAMES = {
    "array": b"\xdd" + ANNOUNCED,
    "map": b"\xdf" + ANNOUNCED,
    "string": b"\xdb" + ANNOUNCED,
    "bytes": b"\xc6" + ANNOUNCED,
    "extension": b"\xc9" + ANNOUNCED + b"\x01",
}
anything = wire.decoder(object)


@pytest.mark.parametrize("inside", [False, True], ids=["whole frame", "inside a message"])
@pytest.mark.parametrize("kind", FRAMES)
def test_announced_lengths_cost_nothing(kind: str, inside: bool) -> None:
    frame = b"\x82\xa2id\x01\xa4body" + FRAMES[kind] if inside else FRAMES[kind]
    tracemalloc.start()
    try:
        for decode in (decode_request, decode_reply, anything):
            with pytest.raises(ProtocolError, match=f"undecodable message of {len(frame)} bytes"):
                decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "message",
    [[0] * 65_537, "a" * 65_537, b"a" * 1_025, {str(key): 0 for key in range(65)}, msgpack.ExtType(1, b"a")],
    ids=["array", "string", "bytes", "map", "extension"],
)
def test_lengths_over_the_limits_are_refused(message: object) -> None:
    with pytest.raises(ProtocolError, match="exceeds max_"):
        anything(msgpack.packb(message))


def test_a_frame_over_the_limit_is_not_unpacked() -> None:
    with pytest.raises(ProtocolError, match=rf"needed at most {wire.MAX_FRAME_BYTES} bytes"):
        anything(msgpack.packb([b"a" * 1_000] * 1_100))


def test_the_longest_messages_fit() -> None:
    """The samples of the largest batch, and more slots than 64 GiB of memory hold."""
    samples = [2**62] * 4096  # the bound of plan.max_samples_per_batch
    reply = Reply(1, Lease(1, 2, BatchInfo(2**33, "train", 5, 1000, closes=True), samples))
    assert decode_reply(wire.encode(reply)) == reply
    request = Request(1, Incarnation("target", 2, 4711, 2**40), Work([Held(slot, 2**40) for slot in range(32_768)]))
    assert decode_request(wire.encode(request)) == request
