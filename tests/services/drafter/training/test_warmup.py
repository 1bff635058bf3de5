"""The warm-up changes nothing, runs every size of a batch, and names the budget that fits if the memory does not suffice."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from common.config import Config
from common.errors import ConfigError
from services.drafter.model.model import DraftModel
from services.drafter.training.budget import with_anchors
from services.drafter.training.optimizer import MasterAdamW
from services.drafter.training.training_state import TrainingState, full_shape, make_up_batch
from services.drafter.training.warmup import halved_shapes, warm_up
from tests.builders.batches import BLOCK_SIZE, HIDDEN_SIZE, NUM_TAPS, VOCAB_SIZE, dflash2, frozen_weights, make_config


def config_of(max_tokens: int, anchors: int, bucket_lengths: list[int], **options: int | str) -> Config:
    config = make_config(anchors_per_batch=anchors, **options)  # type: ignore[arg-type]
    plan = msgspec.structs.replace(config.plan, max_tokens_per_batch=max_tokens, bucket_lengths=bucket_lengths)
    return msgspec.structs.replace(config, plan=plan)


def make_state(config: Config, device: str = "cpu") -> TrainingState:
    model = DraftModel(config, torch.device(device))
    embed, head = (weight.to(model.fc.weight.dtype) for weight in frozen_weights(device=device))
    return TrainingState(model, (embed, head), MasterAdamW(model, config.train, 10, BLOCK_SIZE))


def test_sizes_are_halved_down_to_a_block() -> None:
    shapes = halved_shapes(config_of(300, 16, [16, 32, 64]))
    assert shapes == [(9, 32), (4, 32), (2, 32), (1, 32), (1, 16), (1, 8), (1, 4)]
    assert halved_shapes(config_of(40, 16, [32])) == [(1, 32), (1, 16), (1, 8), (1, 4)]


def test_the_first_batch_is_as_full_as_a_batch_can_be() -> None:
    assert full_shape(config_of(256, 16, [16, 32, 64])) == (8, 32)
    assert full_shape(config_of(256, 16, [16, 48, 64])) == (16, 16)  # five of 48 leave 16 tokens free
    plan = msgspec.structs.replace(
        make_config().plan, max_tokens_per_batch=256, bucket_lengths=[16, 32, 64], max_samples_per_batch=2
    )
    assert full_shape(msgspec.structs.replace(make_config(), plan=plan)) == (2, 64)


def test_the_warm_up_changes_no_bit_and_a_stop_ends_it() -> None:
    config = config_of(128, 16, [32])
    state = make_state(config)
    model, _, optimizer = state
    before = {name: tensor.clone() for name, tensor in [*optimizer.state_dict().items(), *model.state_dict().items()]}
    turns: list[int] = []
    warm_up(state, config, lambda: turns.append(1))
    assert len(turns) == len(halved_shapes(config)) == 6
    after = {**optimizer.state_dict(), **model.state_dict()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not optimizer.gradients.sums.values.any()

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        warm_up(state, config, stop)


def test_made_up_rows_vary_and_do_not_change_the_random_state() -> None:
    before = torch.get_rng_state()
    batches = [make_up_batch(3, 20, make_config(), torch.device("cpu")) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    hidden_states, input_ids = batches[0].hidden_states, batches[0].input_ids
    assert torch.equal(batches[1].hidden_states, hidden_states)
    assert hidden_states.shape == (60, NUM_TAPS, HIDDEN_SIZE)
    assert len({tuple(row) for row in hidden_states.flatten(1).tolist()}) == 60
    assert 0.9 < float(hidden_states.float().std()) < 1.1
    assert len(set(input_ids.tolist())) > VOCAB_SIZE // 2
    assert input_ids.max() < VOCAB_SIZE


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_no_size_compiles_anything_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    config = dflash2(config_of(2048, 256, [64, 128], dtype="bfloat16", head_dim=16, anchors_per_document=64), kind=kind)
    state = make_state(config, "cuda")
    warm_up(state, config, lambda: None)
    kernels = set(tmp_path.rglob("*"))
    assert kernels
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in ((15, 127), (9, 101), (5, 64), (3, 33), (1, 77), (1, 19), (1, 5), (2, 2)):
            state.rehearse_batch(make_up_batch(*shape, config, state.device), config)
            state.rehearse_step()
    assert set(tmp_path.rglob("*")) == kernels


@pytest.fixture
def whole_memory() -> Iterator[None]:
    """Free the memory of the GPU before the test, and its limit after it."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_budget_that_does_not_fit_is_refused_with_one_that_does(whole_memory: None) -> None:
    config = config_of(1 << 16, 1 << 16, [1024], dtype="bfloat16", head_dim=16, anchors_per_document=1024)
    state = make_state(config, "cuda")
    before = torch.cuda.memory_reserved()
    warm_up(state, config, lambda: None)
    needed = torch.cuda.memory_reserved() - before
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + needed / 2) / torch.cuda.mem_get_info()[1])
    held = torch.cuda.memory_allocated()
    with pytest.raises(
        ConfigError, match=r"train.anchors_per_batch: needed at most \d+ for all .* of cuda.*, found 65536"
    ) as error:
        warm_up(state, config, lambda: None)
    print(needed, error.value)
    assert torch.cuda.memory_allocated() == held
    match = re.search(r"at most (\d+)", str(error.value))
    assert match is not None
    fitting = int(match[1])
    assert 4096 <= fitting < 65536
    warm_up(state, with_anchors(config, anchors_per_batch=fitting), lambda: None)
