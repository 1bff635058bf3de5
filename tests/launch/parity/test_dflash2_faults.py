"""launch.parity names the first stage and the cause of every fault that was planted in a drafter of DFlash 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch.parity import plain as plain_module
from launch.parity import plain_dflash2, training_dflash2
from launch.parity.__main__ import main
from launch.parity.folder import Folder
from launch.parity.stages import Selection
from services.drafter.model import convolution as convolution_module
from services.drafter.model import layers as layers_module
from services.drafter.model.selector import Candidates, CandidateSelector
from services.drafter.model.step import predict_blocks
from tests.builders.dflash2_folders import make_dflash2_run
from tests.builders.parity_runs import edit_config, edit_tensor

Plant = Callable[[Path], None]  # changes a drafter's folder
CONV, SELECTOR = "layers.1.mlp_conv", "candidate_selector"


def config(**changes: Any) -> Plant:
    return lambda folder: edit_config(folder, **changes)


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    return lambda folder: edit_tensor(folder, name, change)


def kernels(change: Callable[[Tensor], Tensor], of_projection: bool = True) -> Plant:
    """Change both weights of one convolution, or its base alone, as [side, tap, channel or group, ...]."""

    def plant(folder: Path) -> None:
        edit_tensor(folder, f"{CONV}.base_kernel", lambda base: change(base).contiguous())
        if of_projection:
            name = f"{CONV}.kernel_projection.weight"
            edit_tensor(folder, name, lambda weight: change(weight.view(2, 2, -1, 32)).reshape(-1, 32))

    return plant


def swap_codebooks(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    first, second = f"{SELECTOR}.predecessor_codebook", f"{SELECTOR}.successor_codebook"
    swapped = tensors | {first: tensors[second], second: tensors[first]}
    save_file(swapped, folder / "model.safetensors", metadata={"format": "pt"})


def narrow(folder: Path) -> None:
    edit_config(folder, dflash_config={"selector_rank": 4})
    for name in ("predecessor_codebook", "successor_codebook"):
        edit_tensor(folder, f"{SELECTOR}.{name}", lambda codebook: codebook[:, :4].contiguous())
    edit_tensor(folder, f"{SELECTOR}.hidden_projection.weight", lambda weight: weight[:4].contiguous())


TAPS, OTHER_SIDE, LAYOUT = "tap order: ", "sides swapped: ", "layout: [tap][side] is read"
# Fault: what plants it, the stage, the beginning of the reading, what the cause must say.
FAULTS: dict[str, tuple[Plant, str, str, str]] = {
    "taps swapped": (kernels(lambda kernel: kernel.flip(1)), "convolutions", "layer 1, mlp", f"{CONV}: {TAPS}"),
    "taps swapped in the base": (
        kernels(lambda kernel: kernel.flip(1), of_projection=False),
        "convolutions",
        "layer 1, mlp side 0",
        "its own (base_kernel only)",
    ),
    "sides swapped": (kernels(lambda kernel: kernel.flip(0)), "convolutions", "layer 1, mlp", f"{CONV}: {OTHER_SIDE}"),
    "sides and taps transposed": (
        kernels(lambda kernel: kernel.transpose(0, 1)),
        "convolutions",
        "layer 1, mlp",
        f"{CONV}: {LAYOUT}",
    ),
    "groups first": (
        tensor(f"{CONV}.kernel_projection.weight", lambda w: w.view(4, 4, 32).transpose(0, 1).reshape(16, 32)),
        "convolutions",
        "layer 1, mlp coefficients",
        "layout: [group][side][tap] is read",
    ),
    "another step's coefficients": (
        tensor(f"{CONV}.kernel_projection.weight", lambda weight: weight * 1.1),
        "convolutions",
        "layer 1, mlp coefficients",
        f"as those of another step or a damaged file would: {CONV}.kernel_projection.weight",
    ),
    "another step's projection after the convolution": (
        tensor("layers.2.self_attn.o_proj.weight", lambda weight: weight * 1.1),
        "hidden states",
        "layer 2, attention output",
        "a damaged file would: layers.2.self_attn.o_proj.weight",
    ),
    "another step's norm": (
        tensor("layers.0.post_attention_layernorm.weight", lambda weight: weight * 1.1),
        "hidden states",
        "layer 0, mlp input",
        "a damaged file would: layers.0.post_attention_layernorm.weight",
    ),
    "causal inside the block": (
        config(is_causal=True),
        "masks",
        "layer 0, document 0",
        "is_causal or layer_types: this layer looks causally inside a block, the drafter learnt to look both ways",
    ),
    "causality not written": (config(is_causal=None), "masks", "layer 0", "looks causally inside a block"),
    "fewer candidates": (
        config(dflash_config={"selector_top_k": 3}),
        "candidates",
        "",
        "selector_top_k: 3 candidates of a slot, the drafter learnt with 4",
    ),
    "a narrower selector": (
        narrow,
        "selection",
        "scores, document 0",
        "selector_rank: the codebooks are 4 wide, the drafter learnt with 8",
    ),
    "codebooks swapped": (swap_codebooks, "selection", "scores, document 0", "selector: transposed: predecessor_codebook"),
    "successors never loaded": (
        tensor(f"{SELECTOR}.successor_codebook", torch.zeros_like),
        "selection",
        "scores, document 0",
        "selector: not executed, or its codebooks are empty",
    ),
    "predecessors of another step": (
        tensor(f"{SELECTOR}.predecessor_codebook", lambda codebook: codebook * 1.1),
        "selection",
        "scores, document 0",
        f"a damaged file would: {SELECTOR}.predecessor_codebook",
    ),
    "a soft cap that training has not": (
        config(dflash_config={"final_logit_softcapping": 30.0}),
        "logits",
        "document 0",
        "scaled or bent on one side: output_multiplier or final_logit_softcapping",
    ),
    "scaled embeddings": (
        config(dflash_config={"input_embedding_scale": 2.0}),
        "embeddings",
        "document 0",
        "is scaled on one side only",
    ),
    "executed as plain DFlash": (
        config(architectures=["DFlashDraftModel"]),
        "hidden states",
        "",
        "kind or architectures: executed as plain DFlash",
    ),
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dflash2_run(tmp_path_factory.mktemp("parity") / "run")


def compare(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[str, str, str]:
    """Return stage, reading and cause of the first difference that the command reports."""
    assert main([*map(str, arguments), "--json", "--threads", "1"]) == 1
    report = json.loads(capsys.readouterr().out)
    stage = report["first_difference"]
    verdict = next(verdict for verdict in report["stages"] if verdict["stage"] == stage)
    return stage, (verdict["worst"] or {"where": ""})["where"], report["cause"]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_folder_is_named(
    fault: str, untouched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, stage, where, cause = FAULTS[fault]
    shutil.copytree(untouched / "export", tmp_path / "drafter")
    plant(tmp_path / "drafter")
    found_stage, found_where, found_cause = compare(capsys, tmp_path / "drafter", "--reference", untouched)
    assert found_stage == stage
    assert found_where.startswith(where)
    assert cause in found_cause


def swap_tap_order(rows: Tensor, weights: Tensor, base: Tensor, side: int, is_first: Tensor) -> Tensor:
    swapped = weights.view(len(weights), 2, 2, -1).flip(2).flatten(1)
    return RIGHT(rows, swapped, base.flip(1), side, is_first)


def exchange_before_and_after(rows: Tensor, weights: Tensor, base: Tensor, side: int, is_first: Tensor) -> Tensor:
    return RIGHT(rows, weights, base, 1 - side, is_first)


def read_taps_first(rows: Tensor, weights: Tensor, base: Tensor, side: int, is_first: Tensor) -> Tensor:
    transposed = weights.view(len(weights), 2, 2, -1).transpose(1, 2).flatten(1)
    return RIGHT(rows, transposed, base, side, is_first)


def cross_blocks(rows: Tensor, weights: Tensor, base: Tensor, side: int, is_first: Tensor) -> Tensor:
    return RIGHT(rows, weights, base, side, torch.zeros_like(is_first))


RIGHT = convolution_module.convolve


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (swap_tap_order, TAPS),
        (exchange_before_and_after, OTHER_SIDE),
        (read_taps_first, f"{LAYOUT}, where the weights lie as [side][tap] (kernel_projection only)"),
        (cross_blocks, "block edge, the first row"),
    ],
)
def test_faults_in_the_convolutions_of_training(
    fault: Any, cause: str, untouched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (convolution_module, layers_module, training_dflash2):
        monkeypatch.setattr(module, "convolve", fault)
    found_stage, where, found_cause = compare(capsys, untouched)
    assert (found_stage, where.split(", ")[:2]) == ("convolutions", ["layer 0", "attention side 0"])
    assert found_cause.startswith(f"on the needed side, layers.0.attention_conv: {cause}")


def test_a_fault_of_the_fused_layer_alone(
    untouched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cross_after(*arguments: Any) -> Tensor:  # the sublayers' input, which attention gets, stays right
        after = arguments[3] == 1
        crossed: Tensor = (cross_blocks if after else convolution_module.convolve)(*arguments)
        return crossed

    monkeypatch.setattr(layers_module, "convolve", cross_after)
    stage, where, _ = compare(capsys, untouched)
    assert (stage, where.split(", ")[:2]) == ("hidden states", ["layer 0", "document 0"])  # what it really gave is read


def test_the_first_layer_is_read_from_its_distinct_rows(
    untouched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layers_module, "_MIXED", 1)  # slot 1 takes the row of all later slots, which read another row
    stage, where, _ = compare(capsys, untouched)
    assert (stage, where.split(", ")[:2]) == ("convolutions", ["layer 0", "attention side 0"])


@pytest.mark.parametrize(("source", "cause"), [("unary", "but the largest logits'"), ("labels", "but the labels'")])
def test_predecessors_that_were_not_chosen(
    source: str, cause: str, untouched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_blocks: dict[str, Tensor] = {}

    def choose(self: CandidateSelector, hidden: Tensor, candidates: Candidates, anchors: Tensor) -> Tensor:
        given = of_blocks["labels"]
        if source == "unary":
            given = candidates.tokens.gather(2, candidates.logits.argmax(2, keepdim=True))[..., 0]
        chosen = []
        for slot in range(hidden.shape[1]):
            of_slot = Candidates(candidates.tokens[:, slot], candidates.logits[:, slot])
            best = self(hidden[:, slot], of_slot, given[:, slot - 1] if slot else anchors).argmax(1, keepdim=True)
            chosen.append(of_slot.tokens.gather(1, best)[:, 0])
        return torch.stack(chosen, dim=1)

    def predict_with_labels(*arguments: Any) -> Any:
        of_blocks["labels"] = torch.from_numpy(arguments[4].tokens)
        return predict_blocks(*arguments)

    monkeypatch.setattr(training_dflash2, "predict_blocks", predict_with_labels)
    monkeypatch.setattr(CandidateSelector, "select", choose)
    stage, where, found_cause = compare(capsys, untouched)
    assert (stage, where.partition(",")[0]) == ("selection", "scores")
    assert found_cause.startswith("predecessors: ")
    assert found_cause.endswith(cause)


def test_an_engine_that_scores_every_slot_after_the_anchor(
    untouched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def select(folder: Folder, hidden: Tensor, logits: Tensor, anchor: int) -> Selection:
        slots = [plain_dflash2.select(folder, hidden[[k]], logits[[k]], anchor) for k in range(len(hidden))]
        return Selection(*(torch.cat(parts) for parts in zip(*slots, strict=True)))

    monkeypatch.setattr(plain_module, "select", select)
    assert compare(capsys, untouched)[2].endswith("but the anchor everywhere")


def test_candidates_that_are_not_the_largest(
    untouched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plain_dflash2, "largest", lambda logits, count: logits.argsort(1)[:, -count - 1 : -1].sort(1).values)
    stage, where, cause = compare(capsys, untouched)
    assert (stage, where.partition(",")[0]) == ("candidates", "tokens")
    assert cause == "the logits agree, so one side does not take the largest as candidates"


def test_a_hidden_state_of_another_slot(
    untouched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = plain_dflash2.select
    monkeypatch.setattr(plain_module, "select", lambda folder, hidden, *rest: right(folder, hidden.roll(1, 0), *rest))
    assert compare(capsys, untouched)[2] == "selector: the hidden state of another slot is projected"
