"""The two models that the measurements are of: real architectures of target and draft model, random weights, synthetic data.

    python -m launch.bench shapes

The target is a folder beside the configuration of its run, with a config.json and no weights:
`launch/configs/NAME_target`. The draft model stands in that configuration, `launch/configs/NAME.toml`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel

from common.config import Config, load
from common.device.memory import GIB
from common.ring.layout import SlotLayout

SHAPES = ("qwen3_6_27b", "qwen3_8b")
_CONFIGS = Path(__file__).parents[1] / "configs"
_NUM_SAMPLES = 64
_TOKENS_PER_BATCH = 16384


def config_path(shape: str) -> Path:
    return _CONFIGS / f"{shape}.toml"


def random_target(shape: str) -> list[str]:
    """Return the settings that give a run a random target."""
    return [f"model.path={_CONFIGS / f'{shape}_target'}", "model.random_init=true"]


def random_run(shape: str, num_tokens: int, settings: Sequence[str] = ()) -> Config:
    """Load the run `shape` with a random target on one GPU, one drafter beside it, and synthetic data.

    All rows are of up to `num_tokens` tokens and a batch holds as many; `settings` are further `key=value` ones.
    """
    lengths = f"min_length={num_tokens}, max_length={num_tokens}"
    overrides = [
        *random_target(shape),
        f"data={{synthetic={{num_samples={_NUM_SAMPLES}, num_eval_samples=4, {lengths}}}}}",
        f"plan.bucket_lengths=[{num_tokens}]",
        f"plan.max_tokens_per_batch={num_tokens}",
        "plan.batches_per_step=1",
        'targets.devices=["cuda:0"]',
        'drafters.devices=["cuda:0"]',
        *settings,
    ]
    return load(config_path(shape), overrides)


def count_parameters(config: Config, num_layers: int) -> int:
    """Count the parameters of a target's embedding and first layers, without making them."""
    text_config = AutoConfig.from_pretrained(config.model.path, local_files_only=True).get_text_config(decoder=True)
    with torch.device("meta"):
        decoder = AutoModel.from_config(text_config)  # type: ignore[no-untyped-call]
    parts = [decoder.get_input_embeddings(), *decoder.layers[:num_layers]]
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


def main(arguments: Sequence[str]) -> int:
    """Print the memory of both."""
    for shape in SHAPES:
        config = random_run(shape, _TOKENS_PER_BATCH)
        num_layers = config.draft.tap_layers[-1] + 1
        num_parameters, layout = count_parameters(config, num_layers), SlotLayout.of(config)
        print(f"{shape}: {config.shape.model_type}, {num_layers} of {config.shape.num_hidden_layers} layers run")
        print(f"  their weights and the embedding {num_parameters / 1e9:.2f} G, {num_parameters * 2 / GIB:.1f} GiB in bfloat16")
        print(f"  a slot of {_TOKENS_PER_BATCH} tokens {layout.stride / GIB:.2f} GiB")
    return 0
