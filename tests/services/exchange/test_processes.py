"""A real exchange, real targets and drafters, and kill -9."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from common import wire
from common.actor import messages
from common.actor.lifecycle import EXIT_DONE, EXIT_HOPELESS
from common.actor.messages import PROTOCOL_VERSION, ActorDied, Done, Hello, Incarnation, Refused, Reply, Request, Welcome
from common.data.dataset import Dataset
from common.ring.checksum import checksum
from common.run_dir import exchange_address
from services.exchange.plan import Plan
from tests.builders.huge_frames import BOUND_BYTES, peak_bytes, send_huge_frames
from tests.builders.process_run import ProcessRun, read_record

NUM_KILLS = 14
BATCHES_BETWEEN_KILLS = 7


def expected_record(run: ProcessRun, rank: int) -> list[tuple[int, int]]:
    """Return the batches and steps of an undisturbed rank."""
    lengths = {kind: Dataset.open(run.run_dir / kind).lengths for kind in ("train", "eval")}
    plan = Plan(run.config, lengths["train"], lengths["eval"])
    record = []
    for batch in range(rank, plan.num_batches, run.config.num_drafters):
        if ids := plan.sample_ids(batch):
            num_tokens = int(lengths[plan.info(batch).kind][ids].sum())
            hidden_states = torch.full((num_tokens, 2, 8), batch, dtype=torch.bfloat16)
            record.append((batch, int(checksum(hidden_states))))
    return record


def test_every_batch_is_taken_once_and_in_order_though_anybody_is_killed_at_any_time(tmp_path: Path) -> None:
    rng = random.Random(5)
    with ProcessRun(tmp_path, num_samples=120, epochs=2) as run:
        actors = [(role, index) for role in ("target", "drafter") for index in range(2)]
        for role, index in actors:
            run.start(role, index)
        run.wait_until_ready()
        for number in range(NUM_KILLS):
            run.wait_until_taken(number * BATCHES_BETWEEN_KILLS)
            time.sleep(rng.random() * 0.02)
            alive = [actor for actor in actors if run.actors[actor].is_alive()]
            run.kill(*(("exchange", 0) if number % 7 == 3 else rng.choice(alive)))
        drafters = [run.actors["drafter", rank] for rank in range(2)]
        for drafter in drafters:
            drafter.join(60)
        assert [drafter.exitcode for drafter in drafters] == [0, 0]
        for rank in range(2):
            assert read_record(tmp_path, rank) == expected_record(run, rank)
        assert "Traceback" not in run.log.read_text()


def test_a_second_exchange_on_the_same_run_directory_ends_with_one_clear_line(tmp_path: Path) -> None:
    with ProcessRun(tmp_path, num_samples=4, epochs=1) as run:
        run.wait_until_ready()
        written = len(run.log.read_text().splitlines())
        assert run.start_exchange().wait() == EXIT_HOPELESS
        *_, line = lines = run.log.read_text().splitlines()[written:]
        assert len(lines) == 2 and "started" in lines[0]
        assert line.endswith(f"{tmp_path}: needed no other exchange, found exchange.lock held")
        run.exchange.send_signal(signal.SIGTERM)
        assert run.exchange.wait() == EXIT_DONE


HELLO = Hello(PROTOCOL_VERSION)
WHO = Incarnation("target", 0, 1, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessRun]:
    with ProcessRun(tmp_path_factory.mktemp("run"), num_samples=4, epochs=1) as run:
        run.wait_until_ready()
        yield run


@pytest.mark.parametrize(
    ("frames", "refused"),
    [
        ([b""], None),
        ([b"\xc1"], None),
        ([b"hello?"], None),
        ([b"\x91" * 100_000], None),
        ([b"a", b"b", b"c"], None),
        ([wire.encode({"id": "one"})], None),
        ([wire.encode({"id": 5, "sender": 1})], "undecodable"),
        ([wire.encode({"id": 5, "sender": ["target", 0, 1, 1], "body": {"type": "Dance"}})], "undecodable"),
        ([wire.encode(Request(5, WHO, Hello(99)))], f"needed protocol version {PROTOCOL_VERSION}, found 99"),
        (
            [wire.encode(Request(5, Incarnation("target", 9, 1, 1), HELLO))],
            "needed a target from 0 to 1, found 9",
        ),
        (
            [wire.encode(Request(5, Incarnation("cook", 0, 1, 1), HELLO))],
            "needed to come from target or drafter",
        ),
    ],
)
def test_nothing_that_anybody_sends_ends_the_exchange(run: ProcessRun, frames: list[bytes], refused: str | None) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(exchange_address(run.run_dir))
        socket.send_multipart(frames)
        socket.send(wire.encode(Request(6, WHO, HELLO)))  # answered after whatever the frames set free
        replies: list[Reply] = []
        while not replies or replies[-1].id != 6:
            assert socket.poll(20_000), "the exchange is silent"
            replies.append(messages.decode_reply(socket.recv()))
    assert isinstance(replies[-1].body, Welcome)
    if refused is None:
        assert len(replies) == 1
    else:
        assert replies[0].id == 5 and isinstance(replies[0].body, Refused) and refused in replies[0].body.reason
    assert run.exchange.poll() is None
    assert "Traceback" not in run.log.read_text()


def test_huge_frames_are_not_taken_into_memory(run: ProcessRun) -> None:
    before = peak_bytes(run.exchange.pid)
    send_huge_frames(exchange_address(run.run_dir))
    assert isinstance(run.channel.ask(ActorDied(1, 1), lambda: True), Done)
    assert peak_bytes(run.exchange.pid) - before < BOUND_BYTES
    assert run.exchange.poll() is None
