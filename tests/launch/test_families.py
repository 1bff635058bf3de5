"""One family of each kind as the target of a whole run: trained for, exported, and the export compared with the checkpoint."""

from pathlib import Path

import pytest

from common import config as configuration
from launch.operate.report import read_series
from launch.parity.__main__ import main as parity
from tests.builders.families import VOCABULARY, make_family
from tests.builders.launched_runs import LaunchedRun

pytestmark = pytest.mark.whole_run

KINDS = {
    "dense": "gpt_neox",
    "MoE": "qwen3_moe",
    "MLA": "deepseek_v3",
    "hybrid": "nemotron_h",
    "wrapper": "llama4",
    "sinks": "gpt_oss",
    "hyper-connections": "deepseek_v4",
    "scaled embedding": "gemma2",  # and a softcap of the logits
    "scaled logits": "cohere2",
}


@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_a_whole_run_with_a_target_of_kind(name: str, tmp_path: Path) -> None:
    make_family(name, tie_word_embeddings=False).bfloat16().save_pretrained(tmp_path / "target")
    kind = "dflash2" if name == "gemma2" else "dflash"
    draft = [
        f"draft.kind={kind}",
        f"draft.mask_token_id={VOCABULARY - 1}",
        "draft.tap_layers=[0, 2]",
        "draft.intermediate_size=48",
    ]
    model = [f"model.path={tmp_path / 'target'}", "model.random_init=false"]
    run = LaunchedRun(tmp_path / "run").start(*model, *draft, "plan.epochs=4")
    assert run.end() == 0, run.stderr
    config = configuration.read(run.directory)
    assert config.shape.vocab_size == VOCABULARY and config.shape.source
    assert read_series(run.directory, 1)
    assert parity([str(run.directory), "--threads", "1", "--num-documents", "2"]) == 0
