"""launch.parity says "the same" of untouched drafters of DFlash 2, and both sides follow the formulas of the specification."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.parity.__main__ import main
from launch.parity.compare import compare_traces, first_difference
from launch.parity.folder import Folder, LayerKind, Rope, read_folder
from launch.parity.plain_dflash2 import Convolution, largest, pair_scores, select
from launch.parity.probe import read_documents
from launch.parity.reference import TrainedDrafter
from launch.parity.stages import STAGES, Reading, Trace, find
from launch.parity.ties import ROUNDING
from services.drafter.model.convolution import convolve
from services.drafter.model.selector import top_candidates
from tests.builders.dflash2_folders import make_dflash2_run

ONE_SLIDING = ["draft.num_layers=1", "draft.layer_types=['sliding_attention']"]
FIVE_SLIDING = ["draft.num_layers=5", f"draft.layer_types={['sliding_attention'] * 5}"]
FULL = ["draft.layer_types=[]", "draft.sliding_window=0"]
KINDS: dict[str, list[str]] = {
    "1 layer, block 2, sliding, both ways": [*ONE_SLIDING, "draft.block_size=2"],
    "1 layer, block 4, full": ["draft.num_layers=1", *FULL],
    "1 layer, block 8, full, causal": ["draft.num_layers=1", *FULL, "draft.is_causal=true", "draft.block_size=8"],
    "5 layers, block 2, full": ["draft.num_layers=5", *FULL, "draft.block_size=2"],
    "5 layers, block 4, full, causal": ["draft.num_layers=5", *FULL, "draft.is_causal=true"],
    "5 layers, block 8, sliding, both ways": [*FIVE_SLIDING, "draft.block_size=8", "draft.sliding_window=10"],
    "one group": ["draft.conv_group_size=32"],
    "a channel per group": ["draft.conv_group_size=1"],
    "every token a candidate": ["draft.selector_top_k=64"],
}


def compare(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Return exit code and JSON of the command, run in this process."""
    code = main([*map(str, arguments), "--json", "--threads", "1"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untouched_folder_is_the_same(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_dflash2_run(tmp_path / "run", *KINDS[kind])
    for arguments in ([], ["--reference", "training"]):
        code, report = compare(capsys, run, *arguments)
        assert (code, [stage["worst"] or stage["note"] for stage in report["stages"] if not stage["same"]]) == (0, [])
        assert [stage["stage"] for stage in report["stages"]] == list(STAGES)
        closest = max(stage["difference"] / stage["bound"] for stage in report["stages"] if stage["bound"])
        assert 0 < closest < 0.2  # far from an alarm, and both sides did compute


def test_the_layout_of_speculators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_dflash2_run(tmp_path / "run", layout="speculators")
    code, report = compare(capsys, run)
    assert (code, [stage["worst"] or stage["note"] for stage in report["stages"] if not stage["same"]]) == (0, [])
    folder = read_folder(run / "export")
    assert folder.settings["kind"] == "dflash2"
    assert folder.kinds == [LayerKind(window=6, causal=False)] * 3


def test_a_table_has_the_stages_of_the_drafter_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_dflash2_run(tmp_path / "run")
    assert main([str(run), "--threads", "1"]) == 0
    rows = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row in STAGES] == list(STAGES)


def test_settings_that_no_engine_can_do_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_dflash2_run(tmp_path / "run")
    own = json.loads((run / "export/config.json").read_text())["dflash_config"]
    for change, message in (
        ({"conv_group_size": None}, "needed the key 'conv_group_size', found none"),
        ({"conv_kernel_size": 3}, "found a value that is none: conv_kernel_size 3"),
        ({"selector_rank": 4}, "candidate_selector.hidden_projection.weight: needed [4, 32], found [8, 32]"),
        ({"conv_group_size": 16}, "layers.0.attention_conv.kernel_projection.weight: needed [8, 32], found [16, 32]"),
    ):
        shutil.copytree(run / "export", tmp_path / "changed", dirs_exist_ok=True)
        content = {key: value for key, value in (own | change).items() if value is not None}
        written = json.loads((run / "export/config.json").read_text())
        (tmp_path / "changed/config.json").write_text(json.dumps({**written, "dflash_config": content}))
        capsys.readouterr()
        assert main([str(tmp_path / "changed"), "--reference", str(run), "--threads", "1"]) == 2
        assert message in capsys.readouterr().err


def plain_folder(tensors: dict[str, Tensor], **settings: Any) -> Folder:
    return Folder(Path(), {}, settings, [], [], "silu", Rope(torch.zeros(1), 1.0), None, tensors)


def test_the_convolutions_are_the_formula_written_by_hand() -> None:
    """Check three rows of four channels in two groups; the third begins another block.

    w[side][tap][channel] = base + dynamic of the channel's group; output = w[tap 0] * row + w[tap 1] * the row before.
    """
    base = torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]], [[-1, -2, -3, -4], [0.5, 0.5, 0.25, 0.25]]])
    projection = torch.zeros(8, 4)  # side, tap, group; made from the first channel alone
    projection[:, 0] = torch.tensor([10.0, 20, 30, 40, 50, 60, 70, 80])
    entering = torch.tensor([[1.0, 9, 9, 9], [2, 9, 9, 9], [-1, 9, 9, 9]])
    rows = torch.tensor([[1.0, 1, 1, 1], [1, 2, 3, 4], [1, 0, 0, 2]])
    needed = {
        0: [
            [1 + 10, 2 + 10, 3 + 20, 4 + 20],
            [(1 + 20) * 1 + (5 + 60) * 1, (2 + 20) * 2 + (6 + 60), (3 + 40) * 3 + (7 + 80), (4 + 40) * 4 + (8 + 80)],
            [1 - 10, 0, 0, (4 - 20) * 2],
        ],
        1: [
            [-1 + 50, -2 + 50, -3 + 60, -4 + 60],
            [
                (-1 + 100) * 1 + (0.5 + 140),
                (-2 + 100) * 2 + (0.5 + 140),
                (-3 + 120) * 3 + (0.25 + 160),
                (-4 + 120) * 4 + (0.25 + 160),
            ],
            [-1 - 50, 0, 0, (-4 - 60) * 2],
        ],
    }
    folder = plain_folder({"c.base_kernel": base, "c.kernel_projection.weight": projection}, conv_group_size=2)
    kernels = entering @ projection.T
    for side, expected in needed.items():
        blocks = (slice(0, 2), slice(2, 3))
        convolved = [Convolution.make(folder, "c", entering[block]).apply(rows[block], side) for block in blocks]
        assert torch.cat(convolved).tolist() == expected
        is_first = torch.tensor([[True], [False], [True]])
        assert convolve(rows, kernels, base, side, is_first).tolist() == expected


def test_the_scores_are_the_formula_written_by_hand() -> None:
    """Check a table of two candidates after two: logit + sum over r of predecessor[before] * projected hidden * successor."""
    predecessors = torch.tensor([[0.0, 0], [1, 2], [3, -1], [9, 9]])
    successors = torch.tensor([[9.0, 9], [1, 0], [0, 1], [2, 2]])
    projection, hidden = torch.tensor([[1.0, 0, 0], [0, 10, 0]]), torch.tensor([2.0, 3, 99])  # projected: 2, 30
    folder = plain_folder(
        {
            "candidate_selector.predecessor_codebook": predecessors,
            "candidate_selector.successor_codebook": successors,
            "candidate_selector.hidden_projection.weight": projection,
        },
        selector_top_k=2,
    )
    table = pair_scores(folder, hidden, torch.tensor([0.5, -0.5]), torch.tensor([1, 2]), torch.tensor([1, 3]))
    after_1 = [0.5 + 1 * 2 * 1 + 2 * 30 * 0, -0.5 + 1 * 2 * 2 + 2 * 30 * 2]
    after_2 = [0.5 + 3 * 2 * 1 + -1 * 30 * 0, -0.5 + 3 * 2 * 2 + -1 * 30 * 2]
    assert table.tolist() == [after_1, after_2]
    logits = torch.tensor([[0.0, 5, 4, -9], [5.0, -9, -9, 4]])
    chosen = select(folder, torch.stack([hidden, hidden]), logits, anchor=1)
    # Slot 1 after token 1: token 1 has 5 + 2, token 2 has 4 + 60. Slot 2 after token 2: 5 + 3*2*9 - 30*9 and 4 + 3*2*2 - 30*2.
    assert chosen.scores.tolist() == [[5 + 2, 4 + 60], [5 + 54 - 270, 4 + 12 - 60]]
    assert (chosen.predecessors.tolist(), chosen.drafts.tolist()) == ([1, 2], [2, 3])


def test_equal_logits_and_scores_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3, 0, 3, 3], [0, 0, 0, 0, 0]])
    assert largest(logits, 2).tolist() == [[1, 3], [0, 1]]
    names = ("predecessor_codebook", "successor_codebook")
    tensors = {f"candidate_selector.{name}": torch.zeros(5, 2) for name in names}
    folder = plain_folder({**tensors, "candidate_selector.hidden_projection.weight": torch.zeros(2, 3)}, selector_top_k=3)
    assert select(folder, torch.zeros(2, 3), logits, anchor=0).drafts.tolist() == [1, 0]
    assert top_candidates(logits[:1], 3).tokens.tolist() == [[1, 3, 4]]


def test_a_selector_that_is_not_the_unary_choice(tmp_path: Path) -> None:
    """Check that the drafters of these tests could show a fault: convolutions and selector change something."""
    run = make_dflash2_run(tmp_path / "run")
    trace = TrainedDrafter.of_run(run, None, torch.device("cpu")).trace(read_documents(run / "data/eval", 4, 192))
    pairs = zip(trace["logits"], trace["accepted tokens"], strict=True)
    differing = [int((logits.values.argmax(1) != drafts.values[0]).sum()) for logits, drafts in pairs]
    assert sum(differing) >= 6  # of 36 slots
    entering, mixed = (
        find(trace, stage, f"layer 0, attention {part}, {trace['logits'][0].where}")
        for stage, part in (("hidden states", "input"), ("convolutions", "side 0"))
    )
    assert entering is not None
    assert mixed is not None
    assert float((entering - mixed).abs().max()) > 0.1 * float(entering.abs().max())


def block(logits: list[list[float]], tokens: list[list[int]], scores: list[list[float]], drafts: list[int]) -> Trace:
    return {
        "logits": [Reading("block", torch.tensor(logits))],
        "candidates": [Reading("tokens, block", torch.tensor(tokens))],
        "selection": [Reading("scores, block", torch.tensor(scores))],
        "accepted tokens": [Reading("block", torch.tensor([drafts]))],
    }


@pytest.mark.parametrize(("gap", "first"), [(0.5 * ROUNDING, None), (20 * ROUNDING, "candidates")])
def test_the_last_candidate_may_be_either_of_two_near_ones(gap: float, first: str | None) -> None:
    logits = [[4.0, 2.0, 2.0 - gap, 0.0], [0.0, 1.0, 2.0, 3.0]]
    needed = block(logits, [[0, 1], [2, 3]], [[4.0, 2.0], [5.0, 6.0]], [0, 3])
    found = block(logits, [[0, 2], [2, 3]], [[4.0, 7.0], [6.0, 5.0]], [2, 2])
    verdict = first_difference(compare_traces(needed, found))
    assert (verdict.stage if verdict else None) == first


@pytest.mark.parametrize(("gap", "first"), [(0.5 * ROUNDING, None), (20 * ROUNDING, "selection")])
def test_a_choice_may_be_either_of_two_near_scores(gap: float, first: str | None) -> None:
    logits = [[4.0, 2.0], [3.0, 2.0]]
    needed = block(logits, [[0, 1], [0, 1]], [[4.0, 4.0 - gap], [5.0, 6.0]], [0, 1])
    found = block(logits, [[0, 1], [0, 1]], [[4.0, 4.0 - gap], [6.0, 5.0]], [1, 0])
    verdict = first_difference(compare_traces(needed, found))
    assert (verdict.stage if verdict else None) == first


def test_a_tie_does_not_hide_what_was_before_it() -> None:
    needed = block([[4.0, 2.0], [3.0, 2.0]], [[0, 1], [0, 1]], [[4.0, 2.0], [5.0, 5.0]], [0, 0])
    found = block([[4.0, 2.0], [3.0, 2.0]], [[0, 1], [0, 1]], [[4.0, 3.0], [5.0, 5.0]], [0, 1])
    verdict = first_difference(compare_traces(needed, found))
    assert verdict is not None
    assert verdict.stage == "selection"
    assert (verdict.worst and verdict.worst.row) == 0


def test_the_first_difference_follows_the_layers() -> None:
    names = {"convolutions": ["layer 0, attention side 1, b", "layer 1, attention side 0, b"], "hidden states": ["layer 0, b"]}
    needed = {stage: [Reading(name, torch.ones(1, 1)) for name in found] for stage, found in names.items()}
    parts = {
        "layer 1, attention side 0, b": "convolutions",
        "layer 0, b": "hidden states",
        "layer 0, attention side 1, b": "convolutions",
    }
    found = needed
    for name, stage in parts.items():  # from the last to the first
        broken = [reading._replace(values=torch.zeros(1, 1)) if reading.where == name else reading for reading in found[stage]]
        found = {**found, stage: broken}
        verdict = first_difference(compare_traces(needed, found))
        assert verdict is not None
        assert (verdict.stage, verdict.worst and verdict.worst.where) == (stage, name)
