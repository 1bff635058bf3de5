"""An export next to the weights it was made of: the same logits, on the hidden states of held-out rows.

Two comparisons, both in float32 on the same device:

    written     the folder against the same weights rounded to bfloat16: config.json and file say what was trained.
                Both sides do the same arithmetic, so what is allowed is the order of sums: 1e-5 of the largest logit
    rounding    the folder against the float32 weights: what bfloat16 costs. It moves a weight by at most 2^-9 of
                itself, independently; over M matrices in a row that grows as sqrt(M). Allowed are 16 times
                2^-9 * sqrt(M) of the spread of the row's logits, which leaves room for the tail of millions of logits

T packed rows, K taps, H hidden, V vocabulary, N blocks, B block size.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from common.config import Config
from common.dataset import Dataset
from common.errors import CheckpointError
from common.held_out import HeldOut
from services.drafter.anchors import Blocks, choose_blocks
from services.drafter.drafter_folder import read_drafter
from services.drafter.frozen import load_embedding_and_head
from services.drafter.model import DraftModel
from services.drafter.step import PackedBatch, block_hidden
from services.target.model import TargetModel
from services.target.rows import read_rows

_NUM_BLOCKS = 32
_WRITTEN_TOLERANCE, _ROUNDING_FACTOR, _BFLOAT16_HALF_STEP = 1e-5, 16.0, 2.0**-9


class Comparison(NamedTuple):
    """The largest differences of a logit, and what was allowed."""

    num_logits: int
    written: float
    rounding: float
    rounding_bound: float


class LogitCheck:
    """The target's features of some rows, and the weights that an export must equal."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor], num_rows: int, device: torch.device) -> None:
        """Run the target on the first held-out rows, or the first of the training set where nothing is held out.

        Raises:
            HeadraceError: the target or the data are missing or damaged.
        """
        self._config = msgspec.structs.replace(
            config,
            draft=msgspec.structs.replace(config.draft, dtype="float32"),
            train=msgspec.structs.replace(config.train, anchors_per_batch=max(_NUM_BLOCKS, num_rows)),
        )
        self._weights = {name: weight.float() for name, weight in weights.items()}
        self._batch = read_batch(config, num_rows, device)
        self._embedding, self._head = load_embedding_and_head(self._config, device)

    def compare(self, folder: Path) -> Comparison:
        """Measure an export.

        Raises:
            CheckpointError: a logit differs by more than rounding; both numbers are named.
        """
        drafter = read_drafter(folder)
        found = self._logits(drafter.build(self._config), drafter.on(self._config))
        rounded = self._logits(self._model({name: weight.bfloat16().float() for name, weight in self._weights.items()}))
        trained = self._logits(self._model(self._weights))
        written, rounding = (float((found - other).abs().max()) for other in (rounded, trained))
        bound = self._rounding_bound(trained)
        _need(written, _WRITTEN_TOLERANCE * float(rounded.abs().max()), "what was written", folder)
        _need(rounding, bound, "the float32 weights", folder)
        return Comparison(found.numel(), written, rounding, bound)

    def _model(self, weights: Mapping[str, Tensor]) -> DraftModel:
        model = DraftModel(self._config)
        model.load_state_dict(weights)
        return model.eval()

    @torch.inference_mode()
    def _logits(self, model: DraftModel, config: Config | None = None) -> Tensor:
        """float32 [rows, V] of the labelled slots."""
        config, batch = config or self._config, self._batch
        rows = batch.input_ids, batch.loss_mask, batch.cu_seqlens, batch.sample_ids
        blocks: Blocks = choose_blocks(*rows, 0, config)
        hidden = block_hidden(model.to(self._head.device), self._embedding, batch, blocks, config)
        labelled = torch.from_numpy(blocks.label_mask).to(self._head.device)
        return hidden.view(*blocks.labels.shape[:1], -1, hidden.shape[1])[:, 1:][labelled] @ self._head.T

    def _rounding_bound(self, logits: Tensor) -> float:
        num_matrices = 7 * self._config.draft.num_layers + 1
        return _ROUNDING_FACTOR * _BFLOAT16_HALF_STEP * math.sqrt(num_matrices) * float(logits.std(dim=1).max())


def read_batch(config: Config, num_rows: int, device: torch.device) -> PackedBatch:
    """Held-out rows and the target's hidden states of them, packed as a drafter trains on them, in float32."""
    source: Dataset | HeldOut = HeldOut.open(config.data)
    if not source.num_samples:
        source = Dataset.open(Path(config.data.path).expanduser(), damaged=config.data.skip_damaged)
    rows = read_rows(source, range(min(num_rows, source.num_samples)))
    taps = TargetModel.load(config, device).forward(rows.input_ids.to(device))
    real = torch.arange(rows.input_ids.shape[1]) < torch.tensor(rows.lengths)[:, None]
    packed = rows.packed
    return PackedBatch(
        hidden_states=torch.stack(taps, dim=2)[real.to(device)].float(),
        position_ids=torch.from_numpy(packed.position_ids).long().to(device),
        input_ids=packed.input_ids.astype("int64"),
        loss_mask=packed.loss_mask.astype(bool),
        cu_seqlens=packed.cu_seqlens.astype("int64"),
        sample_ids=packed.sample_ids.astype("int64"),
    )


def _need(found: float, allowed: float, what: str, folder: Path) -> None:
    if not found <= allowed:  # a NaN is no agreement
        raise CheckpointError(f"{folder}: its logits differ from {what} by {found:.3g}, needed at most {allowed:.3g}; refused")
