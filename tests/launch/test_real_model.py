"""The demo, whole: a real model, real slots, and a drafter that has learned from the hidden states it was sent.

Its held-out acceptance is measured in four ways that must agree: while it trained; by the exact count over its checkpoint
outside of the run; by the count over its export, imported again; and by decoding with that export.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common import config as configuration
from common.config import Config
from common.data.arrow_file import Sample
from common.data.held_out import HeldOut
from launch import demo, export
from launch.decoding.answer import Limits
from launch.decoding.full_target import load_full_target, stop_tokens
from launch.decoding.held_out import count_acceptance
from launch.decoding.speculate import decode, speculate
from launch.decoding.target_features import TargetFeatures
from launch.operate.report import read_series
from services.drafter.folder.checkpoint import draft_identity, load_weights
from services.drafter.folder.drafter_folder import load_drafter
from services.drafter.model.acceptance import evaluate_batch
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.model import DraftModel
from services.target.rows import make_rows

CPU = torch.device("cpu")
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry"]
FULL = pytest.param({}, 1.6, 0.3, 12, marks=pytest.mark.full_demo, id="full")
SHORT: dict[str, list[str]] = {  # options added to those of each stage; later ones win
    "launch.regenerate": ["--prompts", "prompts.jsonl", "--max-new-tokens", "16", "--batch-size", "48", "--threads", "1"],
    "launch.prepare": ["--eval-samples", "8"],
    "launch.start_all": [
        "--set",
        "draft.kind=dflash",  # the convolutions learn answers of one kind without the hidden states
        "plan.epochs=3",  # of 20 steps of 2 rows
        "plan.batches_per_step=1",
        "plan.bucket_lengths=[56]",
        'targets.devices=["cpu"]',
        'drafters.devices=["cpu"]',
    ],
    "launch.evaluate": ["--num-prompts", "1", "--threads", "1"],  # two threads wait for each other where other tests run
}


def write_prompts(path: Path) -> None:
    """Write prompts of one kind without the system turn of the template, so that few short rows are enough to learn it."""
    texts = [f"{NAMES[n % 8]} has {11 + n} apples and buys {(7 * n + 2) % 30} more. How many now?" for n in range(48)]
    turns = [("system", ""), ("user", "{}"), ("assistant", "")]
    rows = [{"messages": [{"role": role, "content": content.format(text)} for role, content in turns]} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.real_model
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("added", "acceptance", "gain", "num_decoded"), [FULL, pytest.param(SHORT, 1.2, 0.1, 4, id="one kind of prompts")]
)
def test_the_demo_trains_a_drafter_that_serves(
    added: dict[str, list[str]],
    acceptance: float,
    gain: float,
    num_decoded: int,
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_dir, cache = tmp_path / "run", tmp_path / ".cache" / "headrace"
    stages = demo.plan(cache, run_dir)
    if added:  # the short demo takes the model that is there; the full one makes it again
        cache.mkdir(parents=True)
        (cache / smollm2.name).symlink_to(smollm2)
        (tmp_path / "marks").mkdir()
        (tmp_path / "marks" / f"{stages[0].module}.done").write_text(shlex.join(stages[0].command))
        write_prompts(tmp_path / "prompts.jsonl")
        words = {"prompts.jsonl": str(tmp_path / "prompts.jsonl")}
        stages = [
            stage._replace(arguments=stage.arguments + [words.get(word, word) for word in added.get(stage.module, [])])
            for stage in stages
        ]
    monkeypatch.setenv("HOME", str(tmp_path))  # where ~/.cache/headrace is
    assert demo.run(stages, Path(sys.executable), tmp_path / "marks") == 0, capfd.readouterr()
    _, evaluations = read_series(run_dir, configuration.read(run_dir).num_drafters)
    untrained, trained = evaluations[min(evaluations)], evaluations[max(evaluations)]
    assert untrained["acceptance"] <= 1.05
    assert trained["acceptance"] >= acceptance
    assert trained["acceptance"] - trained["acceptance_other_prompt"] >= gain
    assert "same tokens        yes" in capfd.readouterr().out  # launch.evaluate: real decoding equals plain greedy decoding
    assert (run_dir / "export" / "model.safetensors").exists()
    check_agreement(run_dir, trained, tmp_path / "exported", num_decoded)


def check_agreement(run_dir: Path, trained: dict[str, Any], out: Path, num_decoded: int) -> None:
    """Compare all ways to measure the newest checkpoint with its measurement in training."""
    config, checkpoint = configuration.read(run_dir), export.find_checkpoint(run_dir, None, best=False)
    _, weights = load_weights(checkpoint, draft_identity(config))
    model = DraftModel(config)
    model.load_state_dict(weights)
    counted = count_acceptance(config, model, CPU)
    assert msgspec.to_builtins(counted) | {"step": trained["step"]} == trained  # bit for bit

    export.run(run_dir, out, checkpoint, "dflash")
    served = load_drafter(out, config)
    rounded = count_acceptance(config, served, CPU)
    assert abs(rounded.acceptance - counted.acceptance) <= 0.02  # float32 was trained: bfloat16 changes a draft here and there

    target = load_full_target(config, CPU)
    held_out = HeldOut.open(config.data)
    features = TargetFeatures(config, CPU, torch.float32)  # as decoding has them, not as the ring sends them
    samples = [held_out.read(sample_id) for sample_id in range(num_decoded)]
    same = [decoding_equals_count(config, target, features, served, sample) for sample in samples]
    assert sum(same) >= num_decoded - 2


def decoding_equals_count(config: Config, target: Any, features: TargetFeatures, draft: DraftModel, sample: Sample) -> bool:
    """Round by round, of every length. False where greedy decoding no longer gives the recorded answer, which a batch made."""
    start = int(sample.loss_mask.argmax())
    prompt, answer = sample.input_ids[:start].tolist(), sample.input_ids[start:].tolist()
    limits = Limits(len(answer), stop_tokens(target))
    plain = decode(target, prompt, limits).tokens
    drafted = speculate(target, draft, config.draft, prompt, limits)
    assert drafted.tokens == plain
    if plain != answer:
        return False
    batch = features.pack(make_rows([sample.input_ids], [sample.loss_mask], [0], len(sample.input_ids)))
    counted = evaluate_batch(draft, *load_embedding_and_head(config, CPU), batch, config).chosen[0]
    assert np.bincount(drafted.accepted, minlength=config.draft.block_size).tolist() == counted.tolist()
    return True
