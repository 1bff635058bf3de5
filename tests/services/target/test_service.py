"""A target as a process, with an exchange in the test's own: how far ahead it works, and the phases that it reports."""

import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from common import wire
from common.actor import messages
from common.actor.board import Phase
from common.actor.messages import (
    BatchInfo,
    BatchShape,
    Done,
    Held,
    Hello,
    Lease,
    Reply,
    ReplyBody,
    RequestBody,
    SlotReady,
    Welcome,
    Work,
)
from common.run_dir import exchange_address
from launch.bench.harness.stage import Stage
from launch.bench.shapes import random_run

LENGTH, NUM_ROWS = 16, 2
SHAPES = [BatchShape(NUM_ROWS, LENGTH)]


class SlowExchange:
    """Leases two slots of the ring at once, and answers no SlotReady until it may."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.may_welcome, self.may_answer = threading.Event(), threading.Event()
        self.requests: list[RequestBody] = []  # without repetitions
        self.num_leases = 0
        self._seen: set[int] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(exchange_address(stage.run_dir),))
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def wait_for(self, body: RequestBody) -> None:
        while body not in self.requests:  # the test's own time limit ends it
            self._stage.check()
            time.sleep(0.02)

    def _serve(self, address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(address)
            while not self._closing.is_set():
                if not socket.poll(20):
                    continue
                peer, data = socket.recv_multipart()
                request = messages.decode_request(data)
                if request.id not in self._seen:
                    self.requests.append(request.body)
                answer = self._answer(request.body, request.id)
                self._seen.add(request.id)
                if answer is not None:
                    socket.send_multipart([peer, wire.encode(Reply(request.id, answer))])
            socket.close(linger=0)

    def _answer(self, body: RequestBody, request_id: int) -> ReplyBody | None:
        match body:
            case Hello() if self.may_welcome.is_set():
                return Welcome(b"p" * 16, 10, 10, SHAPES)
            case Work() if request_id not in self._seen and self.num_leases < 2:
                slot = self.num_leases
                self.num_leases += 1
                return Lease(slot, 1, BatchInfo(slot, "train", 0, 0, True), [2 * slot, 2 * slot + 1])
            case SlotReady() if self.may_answer.is_set():
                return Done()
        return None


@pytest.fixture
def stage() -> Iterator[Stage]:
    devices = ['targets.devices=["cpu"]', 'drafters.devices=["cpu"]']
    config = random_run("tiny", LENGTH, [*devices, f"plan.max_tokens_per_batch={NUM_ROWS * LENGTH}"])
    with Stage(config, "test") as stage:
        yield stage


@pytest.fixture
def exchange(stage: Stage) -> Iterator[SlowExchange]:
    exchange = SlowExchange(stage)
    yield exchange
    exchange.close()


def test_the_next_batch_is_computed_before_the_one_before_is_announced(stage: Stage, exchange: SlowExchange) -> None:
    """The third Work comes after the second batch was launched and sent; both are still held."""
    exchange.may_welcome.set()
    stage.start("target")
    exchange.wait_for(Work([Held(0, 1), Held(1, 1)]))
    assert [body for body in exchange.requests if isinstance(body, SlotReady)] == [SlotReady(0, 1)]
    exchange.may_answer.set()
    exchange.wait_for(SlotReady(1, 1))


def test_a_target_warms_up_after_it_was_welcomed_and_is_ready_then(stage: Stage, exchange: SlowExchange) -> None:
    [child] = stage.start("target")
    exchange.wait_for(Hello(messages.PROTOCOL_VERSION))
    assert stage.board.read(child.spec.record).phase == Phase.STARTING
    exchange.may_welcome.set()
    exchange.wait_for(Work([]))
    assert stage.board.read(child.spec.record).phase == Phase.READY
    assert "warmed up 1 shape" in child.log.read_text()
