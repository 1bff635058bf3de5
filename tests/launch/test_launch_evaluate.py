"""What a person types after a run: launch.export and launch.evaluate, on the tiny random target."""

import json
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
from common.dataset import Dataset
from common.errors import DataError
from launch import evaluate, export
from launch.decoding.speculate import Decoding
from launch.decoding.target_cache import TargetCache
from launch.full_target import load_full_target, stop_tokens
from launch.synthetic import write_synthetic
from services.drafter.checkpoint import Checkpoint, draft_identity, save
from services.drafter.frozen import load_embedding_and_head
from services.drafter.model import DraftModel
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
    data = msgspec.structs.replace(config.data, eval_path=str(tmp_path / "data/eval"))
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
    assert exported.stdout.startswith(f"{run_dir}/export: 25 tensors of step 2\n")
    shown = run_command("launch.evaluate", run_dir, "--num-prompts", "2", "--max-new-tokens", "9", "--threads", "1")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "held-out sample 0" in shown.stdout
    assert "held-out sample 1" in shown.stdout
    assert "target passes      plain 18, speculative " in shown.stdout
    assert shown.stdout.endswith("same tokens        yes\n")
    answer = next(line for line in shown.stdout.splitlines() if line.startswith("w"))
    left, _, right = answer.partition(" | ")
    assert left.strip() == right.strip()


def test_errors_are_one_line(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate", str(run_dir)])
    assert evaluate.main() == 2
    assert capsys.readouterr().err == f"error: {run_dir}/export/config.json: cannot be read: No such file or directory\n"
    monkeypatch.setattr(sys, "argv", ["export", str(run_dir / "nowhere"), "--out", str(run_dir / "export")])
    assert export.main() == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["evaluate", str(run_dir), "--max-new-tokens", "0"])
    with pytest.raises(SystemExit):
        evaluate.main()
    assert "--max-new-tokens: needed at least 1, found 0" in capsys.readouterr().err
    assert not (run_dir / "export").exists()


@torch.inference_mode()
def test_full_target_is_the_target_of_training(run_dir: Path) -> None:
    config = configuration.read(run_dir)
    full: Any = load_full_target(config, CPU)
    tokens = list(range(20))
    with TargetCache(full, config.draft.tap_layers) as cache:
        taps = cache.prefill([tokens])[1][0]
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


def test_prompts(run_dir: Path) -> None:
    config = configuration.read(run_dir)
    sample = Dataset.open(run_dir / "data/eval").read(1)
    length = len(sample.input_ids) // 4
    prompts = evaluate.held_out_prompts(config, 99)
    assert len(prompts) == 16
    assert prompts[1] == ("held-out sample 1", sample.input_ids[:length].tolist())
    assert evaluate.typed_prompt(config, "w5 w6") == ('prompt "w5 w6"', [5, 6, 1])
    without = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, eval_path=""))
    with pytest.raises(DataError, match="needed an evaluation data set, found none; give --prompt"):
        evaluate.held_out_prompts(without, 1)


def test_summary_tells_where_answers_differ(run_dir: Path) -> None:
    config = configuration.read(run_dir)
    plain = Decoding([1, 2, 3, 4, 5, 6], 6, [])
    same, other, short = Decoding([1, 2, 3, 4, 5, 6], 3, [3, 0]), Decoding([1, 2, 9], 3, [0, 0]), Decoding([1, 2], 2, [0])
    lines = evaluate.summary([(plain, same)], config)
    assert lines[1] == "acceptance length  2.50 tokens per verification round, 2 rounds"
    assert lines[-1] == "same tokens        yes"
    lines = evaluate.summary([(plain, same), (plain, other), (plain, short)], config)
    assert lines[0] == "target passes      plain 18, speculative 8"
    assert lines[2:4] == [f"prompt {index}: the answers differ from token 2 on" for index in (1, 2)]
    assert lines[-1] == "same tokens        no"
