"""Greedy answers by the target in this process, with transformers."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from common.errors import ModelError
from common.quantized_weights import check_quantization
from launch.data.chat import end_ids
from services.target.checkpoint import load_pretrained

MAX_LENGTH = 8192  # of a prompt and its answer where no limit is given: launch.prepare drops what is longer


class NewTokens(NamedTuple):
    """The answer to one prompt, the end token included if there is one."""

    ids: list[int]
    finished: bool


class Generator:
    """A target that answers batches of prompts."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        max_new_tokens: int | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._end_ids = sorted(end_ids(folder, tokenizer))
        if not self._end_ids:
            raise ModelError(f"{folder}: needed an end token in generation_config.json or the tokenizer, found none")
        self._model = load_model(folder, device, dtype)
        self._max_new_tokens = max_new_tokens
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._max_length = min(context or MAX_LENGTH, MAX_LENGTH)
        self._config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=self._end_ids, pad_token_id=self._end_ids[0]
        )

    def answer(self, prompts: list[list[int]]) -> list[NewTokens]:
        """Return greedy answers of one batch, padded on the left to its longest prompt."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[self._end_ids[0]] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        device = self._model.device
        output: torch.Tensor = self._model.generate(  # type: ignore[operator]
            inputs=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=self._config,
            max_new_tokens=self._max_new_tokens or max(1, self._max_length - longest),
        )
        return [self._cut(row[longest:]) for row in output.tolist()]

    def _cut(self, ids: list[int]) -> NewTokens:
        """Padding follows the first end token."""
        end = next((index for index, token in enumerate(ids) if token in self._end_ids), None)
        return NewTokens(ids if end is None else ids[: end + 1], end is not None)


def load_model(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the whole model, head included, in `dtype` or else that of its files.

    Raises:
        ModelError: the weights are missing, damaged or quantized by an unknown rule, or the architecture is unknown.
    """
    check_quantization(folder)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model, report = load_pretrained(_auto_class(config), folder, config, {"": device}, dtype)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{folder}: the model cannot be loaded: {line}") from error
    if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise ModelError(f"{folder}: needed the tensors {', '.join(missing)}, found none of them")
    if (folder / "generation_config.json").is_file():  # transformers reads it only with weights from a folder
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _auto_class(config: PretrainedConfig) -> Any:
    """Return the loader of a model with a head; some multimodal wrappers are known to one of two only."""
    is_wrapper = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
