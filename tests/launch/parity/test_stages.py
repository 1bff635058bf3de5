"""Bounds and mismatches of traces, documents, and faults in the code of training: launch.parity names all of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import DataError
from launch.parity.__main__ import main
from launch.parity.compare import compare_traces, first_difference
from launch.parity.probe import candidates, make_documents, read_documents
from launch.parity.stages import Reading
from launch.parity.ties import ROUNDING
from services.drafter.kernels.key_runs import KeyRuns
from services.drafter.model import layers as layers_module
from services.drafter.model import model as model_module
from services.drafter.model import step as step_module
from services.drafter.model.batch import Ints
from services.drafter.model.visibility import BlockAnchors, LayerMask, key_runs
from services.target import model as target_module
from services.target.model import Capture
from tests.builders.parity_runs import make_run


def taps(values: list[list[float]], where: str = "tap 0") -> dict[str, list[Reading]]:
    return {"taps": [Reading(where, torch.tensor(values))]}


def test_a_bound_is_relative_to_its_row() -> None:
    needed = [[1000.0, 1.0], [1.0, 0.5]]
    within = [[1000.0, 1.0 + 900 * ROUNDING], [1.0, 0.5 + 0.9 * ROUNDING]]
    (verdict,) = compare_traces(taps(needed), taps(within))
    assert verdict.same
    assert (verdict.num_values, verdict.num_differing) == (4, 0)
    assert verdict.difference == pytest.approx(900 * ROUNDING, rel=1e-3)
    assert verdict.bound == 1000 * ROUNDING
    (verdict,) = compare_traces(taps(needed), taps([[1000.0, 1.0], [1.0, 0.5 + 1.1 * ROUNDING]]))
    assert verdict.worst is not None
    assert (verdict.worst.where, verdict.worst.row, verdict.worst.channel, verdict.worst.needed) == ("tap 0", 1, 1, 0.5)
    assert verdict.worst.bound == ROUNDING


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_a_fault_even_where_both_agree(broken: float) -> None:
    (verdict,) = compare_traces(taps([[1.0, 2.0]]), taps([[1.0, broken]]))
    assert (verdict.num_differing, verdict.difference) == (1, float("inf"))
    (verdict,) = compare_traces(taps([[float("nan"), 2.0]]), taps([[float("nan"), 2.0]]))
    assert not verdict.same


def test_exact_stages_have_no_bound() -> None:
    needed, found = ({"tokens": [Reading("block", torch.tensor([[5, 100_000_000 + off]]))]} for off in (0, 1))
    (verdict,) = compare_traces(needed, found)
    assert (verdict.num_differing, verdict.difference, verdict.bound) == (1, 1.0, 0.0)


def test_missing_extra_and_misshapen_readings_are_named() -> None:
    one, two = taps([[1.0, 2.0]]), {"taps": [*taps([[1.0, 2.0]])["taps"], *taps([[3.0, 4.0]], "tap 1")["taps"]]}
    assert compare_traces(two, one)[0].note == "tap 1: needed [1, 2], found nothing"
    assert compare_traces(one, two)[0].note == "tap 1: needed nothing, found it"
    assert compare_traces(one, taps([[1.0]]))[0].note == "tap 0: needed [1, 2], found [1, 1]"
    assert not any(
        verdict.same for verdict in (*compare_traces(two, one), *compare_traces(one, two), *compare_traces(one, taps([[1.0]])))
    )


def test_the_first_stage_of_the_forward_is_named_and_what_was_given_is_left_out() -> None:
    values = [Reading("here", torch.ones(1, 1))]
    needed, found = {"logits": values, "taps": values}, {"logits": [Reading("here", torch.zeros(1, 1))], "masks": values}
    verdicts = compare_traces(needed, found)
    assert [verdict.stage for verdict in verdicts] == ["logits"]
    verdicts = compare_traces(needed, found | {"taps": found["logits"]})
    first = first_difference(verdicts)
    assert first is not None
    assert first.stage == "taps"
    assert first_difference(compare_traces(needed, needed)) is None


@pytest.mark.parametrize(("gap", "same"), [(0.5 * ROUNDING, True), (20 * ROUNDING, False)])
def test_a_near_tie_may_fall_either_way(gap: float, same: bool) -> None:
    logits = torch.tensor([[4.0, 4.0 - gap, 0.0], [1.0, 0.0, 3.0]])
    needed = {"logits": [Reading("block", logits)], "accepted tokens": [Reading("block", torch.tensor([[0, 2]]))]}
    found = {"logits": [Reading("block", logits)], "accepted tokens": [Reading("block", torch.tensor([[1, 2]]))]}
    assert compare_traces(needed, found)[1].same is same
    other = {**found, "accepted tokens": [Reading("block", torch.tensor([[0, 1]]))]}
    assert not compare_traces(needed, other)[1].same


def test_documents_that_are_made_up() -> None:
    documents = make_documents(vocab_size=12, forbidden={3, 11}, longest=70, seed=1)
    assert [len(document.input_ids) for document in documents] == [19, 33, 48, 70]
    assert {int(token) for document in documents for token in document.input_ids} == set(range(12)) - {3, 11}
    for document in documents:
        assert np.flatnonzero(candidates(document.loss_mask)).tolist() == list(range(5, len(document.input_ids) - 1))
        assert document.anchors[0] == 5
        assert document.anchors[-1] == len(document.input_ids) - 2


def test_documents_of_a_data_set(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    whole = read_documents(run / "data/eval", num_documents=3, max_tokens=1000)
    cut = read_documents(run / "data/eval", num_documents=2, max_tokens=4)
    assert (len(whole), len(cut)) == (3, 2)
    for long, short in zip(whole, cut, strict=False):
        assert len(short.input_ids) == int(long.loss_mask.argmax()) + 6  # cut behind the prompt, however long it is
        assert short.anchors
    with pytest.raises(DataError, match="found no such folder"):
        read_documents(tmp_path / "nowhere", 1, 10)


def first_stage(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, first stage and cause for a run."""
    code = main([str(run), "--threads", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    return code, report["first_difference"], report["cause"]


def test_faults_in_the_code_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")

    def both_ways(anchors: BlockAnchors, block_size: int, mask: LayerMask, rows: Ints) -> KeyRuns:
        runs = key_runs(anchors, block_size, mask, rows)
        return runs._replace(own_end=(rows // block_size + 1) * block_size)

    def leaky(anchors: BlockAnchors, block_size: int, mask: LayerMask, rows: Ints) -> KeyRuns:
        return key_runs(anchors._replace(starts=anchors.starts * 0), block_size, mask, rows)

    def off_by_one(layers: Any, tap_layers: list[int]) -> Capture:
        return Capture(layers, [max(layer - 1, 0) for layer in tap_layers])

    def other_theta(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
        return rotation(positions, head_dim, theta / 100)

    def unnormed(heads: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return norm_and_rotate(heads, torch.ones_like(weight), *rest)

    rotation, norm_and_rotate = layers_module.rotation, layers_module.norm_and_rotate
    for module, name, fault, stage, cause in (
        (step_module, "key_runs", both_ways, "masks", "looks causally inside a block, the drafter learnt to look both ways"),
        (step_module, "key_runs", leaky, "masks", "one side looks at rows of another document or block"),
        (target_module, "Capture", off_by_one, "taps", "the same layers are tapped, so the targets differ"),
        (model_module, "rotation", other_theta, "rotary angles", "another kind of scaling"),
        (layers_module, "norm_and_rotate", unnormed, "keys and values", "the weights of this stage agree, so the arithmetic"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fault)
            code, found_stage, found_cause = first_stage(run, capsys)
        assert (code, found_stage) == (1, stage), name
        assert cause in found_cause
    assert first_stage(run, capsys)[0] == 0
