"""Run documents through the target and pack them as a drafter trains on them: a target process and a fetch without a ring.

T real tokens, K taps, H hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Config
from services.drafter.model.batch import PackedBatch
from services.target.model import TargetModel
from services.target.pack import pack
from services.target.rows import TargetRows, make_rows


class TargetFeatures:
    """A target, and the type in which its hidden states leave it."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        """Load the target; ModelError where it cannot be read."""
        self._model = TargetModel.load(config, device)
        self._shape = len(config.draft.tap_layers), config.shape.hidden_size
        self._device, self._dtype = device, dtype

    def pack(self, rows: TargetRows) -> PackedBatch:
        """Run the target on padded rows; hidden states [T, K, H] on the device."""
        indices = torch.from_numpy(rows.token_index).to(self._device)
        checksum = torch.zeros((), dtype=torch.int64, device=self._device)
        hidden_states = torch.empty(len(rows.token_index), *self._shape, dtype=self._dtype, device=self._device)

        def keep(tap_index: int, tap: Tensor) -> None:
            pack(tap, indices, hidden_states[:, tap_index], checksum)

        self._model.run(rows.input_ids.to(self._device), keep)
        packed = rows.packed
        return PackedBatch(
            hidden_states=hidden_states,
            position_ids=torch.from_numpy(packed.position_ids).long().to(self._device),
            input_ids=packed.input_ids.astype(np.int64),
            loss_mask=packed.loss_mask.astype(np.bool_),
            cu_seqlens=packed.cu_seqlens.astype(np.int64),
            sample_ids=packed.sample_ids.astype(np.int64),
        )


def pack_features(
    config: Config, tokens: Sequence[NDArray[np.integer]], masks: Sequence[NDArray[np.generic]], device: torch.device
) -> PackedBatch:
    """Run documents in one padded batch; hidden states float32 [T, K, H] on `device`. ModelError as `TargetFeatures`."""
    return TargetFeatures(config, device, torch.float32).pack(
        make_rows(tokens, masks, range(len(tokens)), max(map(len, tokens)))
    )
