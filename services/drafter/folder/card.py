"""README of an exported drafter: its target, training data, acceptance, and the commands to serve it."""

import json
from pathlib import Path

from common.acceptance import Evaluation
from common.config import Config
from common.data.dataset import Dataset
from common.errors import DataError
from services.drafter.folder.engine_config import LayoutName, target_name

_DFLASH2_NOTE = """
DFlash 2 needs vLLM 0.28 or SGLang 0.5.23 at least. In vLLM, `"draft_sample_method": "probabilistic"` in the speculative config
keeps its acceptance at temperatures above 0.
"""
_ALGORITHMS = {
    "dflash": "arXiv 2602.06036",
    "dflash2": "arXiv 2602.06036, with the convolutions and the candidate selector of DFlash 2 as in z-lab/dflash",
}


def write_card(config: Config, step: int, evaluation: Evaluation | None, layout: LayoutName) -> str:
    """Return the text for weights after `step` optimizer steps; it holds no path of the machine that trained."""
    draft, shape, target = config.draft, config.shape, target_name(config)
    name = "DFlash 2" if draft.kind == "dflash2" else "DFlash"
    return f"""# {name} drafter for {target}

Trained by Headrace (algorithm: {_ALGORITHMS[draft.kind]}). It drafts for this target only, and uses the target's
embedding and head.

- Target: {target}, {shape.num_hidden_layers} layers, taps after layers {", ".join(map(str, draft.tap_layers))}
- Draft model: {draft.num_layers} layers, block size {draft.block_size}, mask token id {draft.mask_token_id}
- Rotary embedding: plain, theta {shape.rope_theta:g}, over the whole head; nothing of it is inherited from the target
{_scaled(shape.embedding_scale)}- Data: {_describe_data(config.data.path)}, {config.plan.epochs} epochs
- Optimizer steps: {step}
- Held-out greedy acceptance length: {_describe(evaluation)}
{_table(config, evaluation) if evaluation else ""}
## Serving

{_serving(config, target, layout)}"""


def _scaled(scale: float) -> str:
    """Return the line about a target that scales its embedding: only some engines know the key."""
    if scale == 1.0:
        return ""
    text = f"the rows of the target's, times {scale:g}: vLLM reads `input_embedding_scale`; not tried with SGLang"
    return f"- Embedding: {text}\n"


def _describe(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "not measured"
    found = f"{evaluation.acceptance:.3f} tokens per verification round, in {evaluation.num_rounds:,} rounds"
    if (selector := evaluation.selector) is None:
        return found
    return f"{found} (without its selector {selector.acceptance_unary:.3f}; candidates allow {selector.acceptance_oracle:.3f})"


def _describe_data(path: str) -> str:
    try:
        dataset = Dataset.open(Path(path).expanduser(), damaged=True)
    except DataError:
        return Path(path).name or "not named"
    return f"{dataset.folder.name}, {dataset.num_samples:,} samples, fingerprint {dataset.fingerprint[:12]}"


def _table(config: Config, evaluation: Evaluation) -> str:
    positions = range(1, config.draft.block_size)
    lines = [
        "",
        "Measured exactly over held-out answers of the target, verified greedily. Column k is the share of rounds that emitted",
        "draft token k; 1 plus the sum of a row's shares is its acceptance length.",
        "",
        f"| set | acceptance length | {' | '.join(map(str, positions))} |",
        f"| --- | --- |{' --- |' * len(positions)}",
    ]
    for name, found in (("all", evaluation), *evaluation.rows()):
        shares = " | ".join(f"{share:.3f}" for share in found.acceptance_per_position)
        lines.append(f"| {name} | {found.acceptance:.3f} | {shares} |")
    return "\n".join([*lines, ""])


def _serving(config: Config, target: str, layout: LayoutName) -> str:
    """Return the commands of z-lab/dflash's README and of speculators' documentation."""
    block_size, selects = config.draft.block_size, config.draft.kind == "dflash2"
    speculative = json.dumps({"method": "dflash", "model": "<this folder>", "num_speculative_tokens": block_size - 1})
    vllm = f"vllm serve {target} --speculative-config '{speculative}'"
    if layout == "speculators":
        named = f"vLLM finds the target in `speculators_config`, where {target} is a name of the hub or a folder beside it"
        return f"{named}:\n\n    vllm serve <this folder>\n\nor\n\n    {vllm}\n"
    mixed = len(set(config.draft.layer_types)) > 1
    note = "; the mix of sliding and full layers needs VLLM_USE_V2_MODEL_RUNNER=1" if mixed else ""
    return f"""vLLM (a backend that computes attention without a causal mask{note}):

    {vllm} \\
        --attention-backend flash_attn --max-num-batched-tokens 32768

SGLang:

    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
        --speculative-draft-model-path <this folder> --speculative-num-draft-tokens {block_size}

Hybrid targets (Qwen3.5, Qwen3.6) also need `--mamba-scheduler-strategy extra_buffer` in SGLang.
{_DFLASH2_NOTE if selects else ""}"""
