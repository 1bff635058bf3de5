"""The target's embedding and head in the drafter: frozen, never saved with the draft model."""

from pathlib import Path

import torch

from common.config import Config
from common.errors import ModelError
from common.weights import EMBEDDING, HEAD, find_embedding, find_head, random_tensor, read_initializer_range, read_tensors


def load_embedding_and_head(config: Config, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Load both [vocabulary, hidden] in `config.draft.dtype`; the head is the embedding itself if the target ties them.

    Raises:
        ModelError: the folder, the weights or one of the tensors is missing, or a shape differs.
    """
    embedding = _load(config, EMBEDDING, device)
    head = embedding if config.shape.tie_word_embeddings else _load(config, HEAD, device)
    return embedding, head


def _load(config: Config, suffix: str, device: torch.device) -> torch.Tensor:
    folder = Path(config.model.path).expanduser()
    shape = (config.shape.vocab_size, config.shape.hidden_size)
    dtype: torch.dtype = getattr(torch, config.draft.dtype)
    if config.model.random_init:
        return random_tensor(suffix, shape, read_initializer_range(folder), config.seed, device, dtype)
    name = find_embedding(folder) if suffix == EMBEDDING else find_head(folder)
    tensor = read_tensors(folder, [name], device, dtype)[name]
    if tensor.shape != shape:
        raise ModelError(f"{folder}: needed {name} {list(shape)}, found {list(tensor.shape)}")
    return tensor
