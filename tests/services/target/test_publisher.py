"""The publisher on a real ring, announced to a small exchange that answers in the test's own process.

B rows, S tokens of a row, K taps, H hidden size.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from common import config as configuration
from common import wire
from common.actor import messages
from common.actor.board import board_bytes
from common.actor.lifecycle import Actor
from common.actor.messages import BatchInfo, Done, Held, Hello, Lease, Reply, SlotReady, Welcome
from common.config import Config
from common.metrics import read_metrics
from common.ring import memory
from common.ring.checksum import checksum
from common.ring.layout import SlotLayout
from common.ring.ring import RingReader, RingWriter
from common.run_dir import exchange_address
from services.target.flops import ForwardFlops
from services.target.health import Health
from services.target.model import TargetModel
from services.target.publisher import Publisher
from services.target.rows import TargetRows, make_rows
from services.target.stages import make_stages
from services.target.staging import Staging

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
NUM_SLOTS, PLAN_HASH = 2, b"p" * 16


class SmallExchange:
    """Welcomes, and says Done to SlotReady as soon as it may."""

    def __init__(self, run_dir: Path) -> None:
        self.ready: list[SlotReady] = []
        self.may_answer = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(exchange_address(run_dir),))
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _serve(self, address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(address)
            while not self._closing.is_set():
                if not socket.poll(20):
                    continue
                peer, data = socket.recv_multipart()
                request = messages.decode_request(data)
                answer: Welcome | Done | None = None
                if isinstance(request.body, Hello):
                    answer = Welcome(PLAN_HASH, 10, 10)
                elif isinstance(request.body, SlotReady) and self.may_answer.is_set():
                    self.ready.append(request.body)
                    answer = Done()
                if answer is not None:
                    socket.send_multipart([peer, wire.encode(Reply(request.id, answer))])
            socket.close(linger=0)


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[SmallExchange]:
    exchange = SmallExchange(tmp_path)
    yield exchange
    exchange.close()


@pytest.fixture
def actor(tmp_path: Path, exchange: SmallExchange, monkeypatch: pytest.MonkeyPatch, scale: int) -> Iterator[Actor]:
    monkeypatch.chdir(ROOT)
    overrides = [
        f"plan.bucket_lengths=[{200 * scale}]",
        f"plan.max_tokens_per_batch={400 * scale}",
        f"ring.num_slots={NUM_SLOTS}",
    ]
    overrides += ["draft.tap_layers=[0, 1, 2, 3]", "ring.dtype=float32"]  # much to copy for few rows
    configuration.write(configuration.load(ROOT / "launch" / "configs" / "tiny.toml", overrides), tmp_path)
    board = memory.create("board", board_bytes(1))
    actor = Actor("target", argparse.Namespace(run_dir=tmp_path, index=0, board_fd=board, record=0))
    actor.join()
    yield actor
    actor.close()


class SmallTarget:
    """The parts of a target behind its model, on a ring of their own."""

    def __init__(self, actor: Actor, device: str) -> None:
        self.layout = SlotLayout.of(actor.config)
        self.device = torch.device(device)
        fd = memory.create("ring", self.layout.ring_bytes(NUM_SLOTS))
        self.reader = RingReader(fd, self.layout, NUM_SLOTS)
        writer = RingWriter(fd, self.layout, NUM_SLOTS)
        stages = make_stages([self.device], [0], actor.config.draft.tap_layers)
        stagings = [Staging(self.layout, stages) for _ in range(2)]
        health = Health(actor.metrics, ForwardFlops(TargetModel.load(actor.config, CPU).decoder), [self.device])
        self.publisher = Publisher(actor, writer, stagings, health, PLAN_HASH)

    def send(self, lease: Lease, rows: TargetRows, taps: list[torch.Tensor]) -> None:
        """Send a batch as the service does, with given taps instead of a forward."""
        staging = self.publisher.take_staging(lease)
        staging.upload(rows)
        for tap_index, tap in enumerate(taps):
            staging.keep(tap_index, tap)
        self.publisher.send(lease, rows, staging, {"launch_s": 0.0})


@pytest.mark.parametrize(("device", "scale"), [("cpu", 1), pytest.param("cuda", 1000, marks=pytest.mark.gpu)])
def test_header_has_the_checksums_of_what_the_slot_holds(
    actor: Actor, exchange: SmallExchange, device: str, scale: int
) -> None:
    """On a GPU the next forward's allocations come while the checksum still waits for the copy before it."""
    target = SmallTarget(actor, device)
    exchange.may_answer.set()
    for generation in (1, 2, 3):
        slot = generation % NUM_SLOTS
        rows, taps = _make_batch(actor.config, [200 * scale, 100 * scale], generation, device)
        target.send(_lease(slot, generation), rows, taps)
        _later = [torch.full((), 7, dtype=torch.int64, device=device) for _ in range(64)]
        _wait_until(lambda generation=generation: len(exchange.ready) == generation)  # type: ignore[misc]
        written = target.reader.open(slot)
        assert written.header.hidden_checksum == int(checksum(written.hidden_states))
        assert written.header.rows_checksum == written.rows.checksum()
        assert written.header[:5] == (PLAN_HASH, generation, 10 * generation, 300 * scale, 2)
        for tap, hidden in zip(taps, written.hidden_states.unbind(1), strict=True):
            real = torch.cat([tap[0], tap[1, : 100 * scale]])
            assert torch.equal(hidden, real.cpu())


@pytest.mark.parametrize("scale", [1])
def test_a_lease_is_held_until_its_announcement_is_answered(actor: Actor, exchange: SmallExchange, scale: int) -> None:
    target = SmallTarget(actor, "cpu")
    assert target.publisher.held() == []
    for slot in (1, 0):
        target.send(_lease(slot, generation=5 + slot), *_make_batch(actor.config, [3, 2], slot, "cpu"))
    assert target.publisher.held() == [Held(0, 5), Held(1, 6)]
    exchange.may_answer.set()
    _wait_until(lambda: not target.publisher.held())
    assert exchange.ready == [SlotReady(1, 6), SlotReady(0, 5)]


@pytest.mark.parametrize("scale", [1])
def test_figures_of_every_batch_are_written(actor: Actor, exchange: SmallExchange, scale: int) -> None:
    target = SmallTarget(actor, "cpu")
    exchange.may_answer.set()
    for generation in (1, 2):
        target.send(_lease(0, generation), *_make_batch(actor.config, [3, 2], generation, "cpu"))
        _wait_until(lambda: not target.publisher.held())
    _wait_until(lambda: len(list(read_metrics(actor.run_dir, actor.name))) == 2)
    first, second = read_metrics(actor.run_dir, actor.name)
    assert (first["batch"], first["num_tokens"], first["num_padded_tokens"]) == (10, 5, 6)
    assert (second["batch"], second["utilisation"]) == (20, None)
    seconds = {name for name in second if name.endswith("_s") and name not in ("time_s", "tokens_per_s")}
    assert seconds == {"interval_s", "upload_s", "forward_s", "pack_s", "copy_s", "launch_s", "publish_s", "idle_s"}
    assert all(second[name] >= 0 for name in seconds)
    assert second["tokens_per_s"] == pytest.approx(5 / second["interval_s"])


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lease(slot: int, generation: int) -> Lease:
    return Lease(slot, generation, BatchInfo(10 * generation, "train", 0, 0, True), [3, 4])


def _make_batch(config: Config, lengths: list[int], seed: int, device: str) -> tuple[TargetRows, list[torch.Tensor]]:
    """Make rows of random tokens and one random tap [B, S, H] per tapped layer."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 60, length).astype(np.int32) for length in lengths]
    rows = make_rows(tokens, [np.ones(length, np.uint8) for length in lengths], [3, 4], max(lengths))
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths), config.shape.hidden_size)
    return rows, [torch.randn(shape, generator=generator).to(device) for _ in config.draft.tap_layers]
