"""The commands after a run: launch.export and launch.evaluate, on the tiny random target."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common import config as configuration
from common.acceptance import Evaluation
from common.config import Config
from launch import evaluate, export
from launch.data.synthetic import write_synthetic
from launch.decoding.full_target import load_full_target, stop_tokens
from launch.decoding.report import Lossless, Report
from launch.decoding.target_cache import TargetCache
from services.drafter.folder.checkpoint import Checkpoint, draft_identity, save
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.model import DraftModel
from services.target.model import TargetModel

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w1 {% endif %}"


def measured(step: int) -> Evaluation:
    acceptance = 1 + step / 100
    return Evaluation(
        step=step,
        acceptance=acceptance,
        acceptance_per_position=[0.3, 0.2, 0.1],
        num_rounds=100,
        num_tokens=round(100 * acceptance),
        acceptance_other_prompt=1.0,
        sets={},
    )


def save_step(run_dir: Path, config: Config, step: int) -> None:
    record = Checkpoint(step=step, next_batch=0, plan_hash="aa", draft=draft_identity(config), evaluation=measured(step))
    weights = {name: weight + step for name, weight in DraftModel(config).state_dict().items()}
    save(run_dir, record, weights, {}, keep=9)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two checkpoints, whose target is a copy of the tiny one with a tokenizer."""
    folder = tmp_path / "target"
    shutil.copytree(ROOT / "launch/configs/tiny_target", folder)
    vocabulary: Any = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=vocabulary, unk_token="w0", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    config = configuration.load(ROOT / "launch/configs/tiny.toml", [f'model.path="{folder}"'])
    write_synthetic(config, tmp_path / "data")
    data = msgspec.structs.replace(
        config.data, path=str(tmp_path / "data/train"), synthetic=None, eval_path=str(tmp_path / "data/eval")
    )
    config = msgspec.structs.replace(config, data=data)
    configuration.write(config, tmp_path)
    for step in (1, 2):
        save_step(tmp_path, config, step)
    return tmp_path


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_export_then_evaluate_as_typed(run_dir: Path) -> None:
    exported = run_command("launch.export", run_dir, "--out", run_dir / "export")
    assert (exported.returncode, exported.stderr) == (0, "")
    assert exported.stdout.startswith(f"{run_dir}/export: 25 tensors of step 2, read back and equal\n")
    limits = ["--num-prompts", "2", "--max-new-tokens", "9", "--threads", "1"]
    shown = run_command("launch.evaluate", run_dir, *limits, "--out", run_dir / "out")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.match(r"held-out acceptance length             \d\.\d{3} in [\d,]+ rounds\n", shown.stdout)
    assert "held-out sample 0" in shown.stdout
    assert "held-out sample 1" in shown.stdout
    assert "target passes      plain 18, speculative " in shown.stdout
    assert "on a CPU this says nothing of a GPU" in shown.stdout
    assert shown.stdout.endswith("same tokens        yes\n")
    answer = next(line for line in shown.stdout.splitlines() if line.startswith("w"))
    left, _, right = answer.partition("│")
    assert left.strip() == right.strip()
    report = msgspec.json.decode((run_dir / "out/evaluation.json").read_bytes(), type=Report)
    assert list(report.categories) == ["eval"]
    assert report.total.plain.num_target_passes == 18
    assert report.total.lossless == Lossless(num_same=2, num_ties=0, num_other=0)


def test_errors_are_one_line(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(run_dir)]) == 2
    assert capsys.readouterr().err == f"error: {run_dir}/export/config.json: cannot be read: No such file or directory\n"
    monkeypatch.setattr(sys, "argv", ["export", str(run_dir / "nowhere"), "--out", str(run_dir / "export")])
    assert export.main() == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        evaluate.main([str(run_dir), "--max-new-tokens", "0"])
    assert "--max-new-tokens: needed at least 1, found 0" in capsys.readouterr().err
    assert not (run_dir / "export").exists()


@torch.inference_mode()
def test_full_target_is_the_target_of_training(run_dir: Path) -> None:
    config = configuration.read(run_dir)
    full: Any = load_full_target(config, CPU)
    tokens = list(range(20))
    with TargetCache(full, config.draft.tap_layers) as cache:
        taps = cache.prefill(tokens)[1]
    training_taps = TargetModel.load(config, CPU).forward(torch.tensor([tokens]))
    assert torch.equal(taps, torch.stack([tap[0] for tap in training_taps], dim=1))
    embedding, head = load_embedding_and_head(config, CPU)
    assert torch.equal(full.get_input_embeddings().weight, embedding)
    assert torch.equal(full.get_output_embeddings().weight, head)
    assert not torch.equal(embedding, head)
    other: Any = load_full_target(msgspec.structs.replace(config, seed=config.seed + 1), CPU)
    assert not torch.equal(other.get_input_embeddings().weight, embedding)


def test_tied_full_target_is_tied(run_dir: Path) -> None:
    path = run_dir / "target/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    config = configuration.read(run_dir)
    full: Any = load_full_target(config, CPU)
    assert full.get_output_embeddings().weight is full.get_input_embeddings().weight
    assert torch.equal(full.get_input_embeddings().weight, load_embedding_and_head(config, CPU)[0])


def test_stop_tokens_of_a_model(run_dir: Path) -> None:
    target = load_full_target(configuration.read(run_dir), CPU)
    assert stop_tokens(target) == set()
    for found, needed in ((2, {2}), ([2, 5], {2, 5})):
        target.generation_config.eos_token_id = found
        assert stop_tokens(target) == needed
