"""launch.export on a run of the tiny target: which checkpoint, which layout, and what is said of it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from common import config as configuration
from common.acceptance import Acceptance, Evaluation, SetAcceptance
from common.config import Config
from common.errors import CheckpointError
from launch import export
from launch.data.synthetic import write_synthetic
from services.drafter.folder.checkpoint import Checkpoint, draft_identity, load_weights, save
from services.drafter.folder.drafter_folder import load_drafter, read_drafter
from services.drafter.model.model import DraftModel

ROOT = Path(__file__).parents[2]


def acceptance(length: float) -> Acceptance:
    return Acceptance(acceptance=length, acceptance_per_position=[length - 1, 0.0, 0.0], num_rounds=10, num_tokens=20)


def measured(step: int, length: float) -> Evaluation:
    fields = msgspec.structs.asdict(acceptance(length))
    of_set = SetAcceptance(**fields, categories={"maths": acceptance(1.9), "stories": acceptance(1.1)})
    return Evaluation(**fields, step=step, acceptance_other_prompt=1.0, sets={"eval": of_set})


def save_step(run_dir: Path, config: Config, step: int, length: float | None) -> None:
    evaluation = measured(step, length) if length else None
    record = Checkpoint(step=step, next_batch=0, plan_hash="aa", draft=draft_identity(config), evaluation=evaluation)
    generator = torch.Generator().manual_seed(step)
    weights = {
        name: weight + 0.3 * torch.randn(weight.shape, generator=generator)
        for name, weight in DraftModel(config).state_dict().items()
    }
    save(run_dir, record, weights, {}, keep=9)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of the tiny random target with three checkpoints; the second one is the best."""
    config = configuration.load(ROOT / "launch/configs/tiny.toml", [f'model.path="{ROOT}/launch/configs/tiny_target"'])
    write_synthetic(config, tmp_path / "data")
    paths = {"path": str(tmp_path / "data/train"), "eval_path": str(tmp_path / "data/eval")}
    config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, **paths))
    configuration.write(config, tmp_path)
    for step, length in ((10, 1.2), (20, 1.5), (30, None)):
        save_step(tmp_path, config, step, length)
    return tmp_path


def run(run_dir: Path, out: Path, layout: Any = "dflash", *, step: int | None = None, best: bool = False) -> str:
    return export.run(run_dir, out, export.find_checkpoint(run_dir, step, best), layout)


@pytest.mark.parametrize(("step", "best", "expected"), [(None, False, 30), (10, False, 10), (None, True, 20)])
@pytest.mark.parametrize("layout", export.LAYOUTS)
def test_checkpoint_and_layout_as_requested(run_dir: Path, step: int | None, best: bool, expected: int, layout: str) -> None:
    config, out = configuration.read(run_dir), run_dir / "out"
    said = run(run_dir, out, layout, step=step, best=best)
    assert said == f"{out}: 25 tensors of step {expected}, read back and equal"
    _, weights = load_weights(run_dir / f"checkpoints/step-{expected:08d}", draft_identity(config))
    assert read_drafter(out).layout == layout
    assert torch.equal(load_drafter(out, config).fc.weight, weights["fc.weight"].bfloat16().float())


def test_speculators_layout_has_its_names_and_ids_one_higher(run_dir: Path) -> None:
    run(run_dir, run_dir / "out", "speculators", best=True)
    found = json.loads((run_dir / "out/config.json").read_text())
    assert found["speculators_model_type"] == found["speculators_config"]["algorithm"] == "dflash"
    assert found["aux_hidden_state_layer_ids"] == [2, 3]
    assert (found["block_size"], found["mask_token_id"], found["draft_vocab_size"]) == (4, 63, 64)
    assert found["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert found["transformer_layer_config"]["num_hidden_layers"] == 2
    assert found["transformer_layer_config"]["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert "target_layer_ids" not in json.dumps(found)
    assert load_file(run_dir / "out/model.safetensors").keys() == DraftModel(configuration.read(run_dir)).state_dict().keys()
    assert "vllm serve <this folder>" in (run_dir / "out/README.md").read_text()


def test_the_card_shows_what_it_is_worth(run_dir: Path) -> None:
    run(run_dir, run_dir / "out", best=True)
    card = (run_dir / "out/README.md").read_text()
    assert "- Data: train, 64 samples, fingerprint " in card
    assert "- Optimizer steps: 20" in card
    assert "length: 1.500 tokens per verification round" in card
    assert "| all | 1.500 | 0.500 | 0.000 | 0.000 |" in card
    assert "| eval/maths | 1.900 | 0.900 | 0.000 | 0.000 |" in card
    assert '"num_speculative_tokens": 3' in card
    assert "--speculative-num-draft-tokens 4" in card
    assert str(run_dir) not in card


def test_what_is_not_there_is_named(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="step-00000007"):
        run(run_dir, run_dir / "out", step=7)
    for step in (10, 20):
        (run_dir / f"checkpoints/step-{step:08d}/checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="needed a checkpoint with its held-out acceptance, found none"):
        run(run_dir, run_dir / "out", best=True)
    assert not (run_dir / "out").exists()
