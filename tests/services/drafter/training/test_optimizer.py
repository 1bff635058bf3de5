"""The optimizer against torch's own, its skipped steps, its state, and two ranks against one."""

import io
import math
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from common.config import TrainConfig
from services.drafter.model.step_sums import StepSums
from services.drafter.training.optimizer import MasterAdamW, learning_rate

TRAIN = TrainConfig(learning_rate=0.01, warmup_ratio=0.3, max_grad_norm=0.5, weight_decay=0.1)
NUM_STEPS = 10


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def sums_of(model: nn.Module, batch: int) -> StepSums:
    """Return the sums of one made-up batch, with its number as the accepted drafts."""
    parameter = next(model.parameters())
    rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(batch)).to(parameter)
    loss = model(rows).square().sum().float()
    return StepSums(torch.cat([loss[None], torch.tensor([5.0, 0.0, batch, 0.0, 0.0, 0.0], device=parameter.device)]))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(model: nn.Module, optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        optimizer.gradients.accumulate(sums_of(model, step))
        optimizer.step(step)


@pytest.mark.parametrize(("max_norm", "clips"), [(0.5, True), (1e4, False)])
def test_steps_equal_torch_adamw_with_accumulation_and_clipping(max_norm: float, clips: bool) -> None:
    model, reference = make_model(), make_model()
    optimizer = MasterAdamW(model, msgspec.structs.replace(TRAIN, max_grad_norm=max_norm), NUM_STEPS, block_size=1)
    adamw = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(NUM_STEPS):
        for batch in (2 * step, 2 * step + 1):
            optimizer.gradients.accumulate(sums_of(model, batch))
        result = optimizer.step(step)

        losses = [sums_of(reference, batch).loss for batch in (2 * step, 2 * step + 1)]
        torch.autograd.backward(losses)
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad /= 10.0
        norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        adamw.param_groups[0]["lr"] = learning_rate(step, NUM_STEPS, 0.01, 0.3)
        adamw.step()
        adamw.zero_grad()

        assert (norm > max_norm) == clips
        torch.testing.assert_close(result.grad_norm, norm)
        torch.testing.assert_close(result.loss, sum(losses) / 10.0)
        assert [float(result.sums.weight), float(result.sums.accepted)] == [10.0, 4 * step + 1]
        assert result.found_inf == 0
        torch.testing.assert_close(flat(model), flat(reference))


def test_bfloat16_models_learn_through_float32_masters() -> None:
    model = make_model(torch.bfloat16)
    slow = TrainConfig(learning_rate=1e-5, warmup_ratio=0.0)
    optimizer = MasterAdamW(model, slow, NUM_STEPS, block_size=1)
    before = optimizer.master.clone()
    train(model, optimizer, range(NUM_STEPS))
    moved = (optimizer.master - before).abs()
    assert (moved > 0).all()  # steps far below the spacing of bfloat16 add up
    assert torch.equal(flat(model), optimizer.master.bfloat16())


@pytest.mark.parametrize("where", ["gradient", "loss", "weight"])
def test_a_step_that_is_not_finite_changes_no_bit(where: str) -> None:
    model = make_model()
    optimizer = MasterAdamW(model, TRAIN, NUM_STEPS, block_size=1)
    train(model, optimizer, range(3))
    weights, state = flat(model).clone(), {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    optimizer.gradients.accumulate(sums_of(model, 3))
    if where == "gradient":
        optimizer.gradients.flat[0] = math.inf
    else:
        getattr(optimizer.gradients.sums, where).fill_(math.nan)
    result = optimizer.step(3)
    assert result.found_inf == 1
    assert torch.equal(flat(model), weights)
    assert all(torch.equal(optimizer.state_dict()[name], tensor) for name, tensor in state.items())
    train(model, optimizer, range(4, 5))
    assert flat(model).isfinite().all()
    assert not torch.equal(flat(model), weights)


def test_a_step_without_labels_is_finite() -> None:
    model = make_model()
    optimizer = MasterAdamW(model, TRAIN, NUM_STEPS, block_size=1)
    optimizer.gradients.accumulate(StepSums(sums_of(model, 0).values * 0))
    assert optimizer.step(0).found_inf == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_from_a_saved_state_is_exact(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = MasterAdamW(model, TRAIN, NUM_STEPS, block_size=1)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    train(model, optimizer, range(4, NUM_STEPS))

    file.seek(0)
    other = make_model(dtype)
    with torch.no_grad():
        next(other.parameters()).zero_()
    resumed = MasterAdamW(other, TRAIN, NUM_STEPS, block_size=1)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(other, resumed, range(4, NUM_STEPS))
    assert torch.equal(flat(other), flat(model))
    assert all(torch.equal(resumed.state_dict()[name], tensor) for name, tensor in optimizer.state_dict().items())


def test_a_state_of_another_model_is_refused() -> None:
    optimizer = MasterAdamW(make_model(), TRAIN, NUM_STEPS, block_size=1)
    other = MasterAdamW(nn.Linear(2, 2), TRAIN, NUM_STEPS, block_size=1)
    with pytest.raises(ValueError, match=r"master: needed shape \(21,\), found \(6,\)"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"master: needed shape .*, found none"):
        optimizer.load_state_dict({})


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 2.0, 0.04) for step in range(101)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[52] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(0, 1, 2.0, 0.04) == 2.0
    assert learning_rate(0, 10, 2.0, 0.0) == 2.0


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = make_model()
    optimizer = MasterAdamW(model, TRAIN, NUM_STEPS, block_size=1)
    for step in range(3):
        optimizer.gradients.accumulate(sums_of(model, 2 * step + rank), dist.all_reduce)
        optimizer.gradients.reduce(dist.all_reduce)
        result = optimizer.step(step)
    torch.save({"weights": flat(model), "sums": result.sums.values}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one_bit_for_bit(tmp_path: Path) -> None:
    spawn(one_rank, args=(str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    model = make_model()
    optimizer = MasterAdamW(model, TRAIN, NUM_STEPS, block_size=1)
    for step in range(3):
        for batch in (2 * step, 2 * step + 1):
            optimizer.gradients.accumulate(sums_of(model, batch))
        result = optimizer.step(step)
    for rank in range(2):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(saved["weights"], flat(model))
        assert torch.equal(saved["sums"], result.sums.values)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_gpu_steps_as_the_cpu_does() -> None:
    model, other = make_model(), make_model().to("cuda")
    pair = [
        (model, MasterAdamW(model, TRAIN, NUM_STEPS, block_size=1)),
        (other, MasterAdamW(other, TRAIN, NUM_STEPS, block_size=1)),
    ]
    for step in range(3):
        for each, optimizer in pair:
            optimizer.gradients.accumulate(sums_of(each, step))
            optimizer.step(step)
    torch.testing.assert_close(flat(other).cpu(), flat(model))
