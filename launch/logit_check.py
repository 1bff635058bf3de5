"""An export next to the weights it was made of: the same logits, on the hidden states of held-out rows.

An export rounds the float32 weights of a checkpoint to bfloat16; that is all it may do. So the folder, read from disk
and built as its own config.json says, runs beside a draft model of the run with the weights rounded in memory, both in
float32 on the same device. Both do the same arithmetic; allowed is what another order of sums may make of float32: 1e-5
of the largest logit. What the rounding itself costs is measured against the float32 weights, and told.

T packed rows, K taps, H hidden, V vocabulary, N blocks, B block size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from common.config import Config
from common.data.dataset import Dataset
from common.data.held_out import HeldOut
from common.errors import CheckpointError
from launch.decoding.target_features import pack_features
from services.drafter.folder.drafter_folder import read_drafter
from services.drafter.model.anchors import Blocks, choose_blocks
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.model import DraftModel
from services.drafter.model.step import PackedBatch, block_hidden

_NUM_BLOCKS = 32
_TOLERANCE = 1e-5  # of the largest logit


class Comparison(NamedTuple):
    """An export beside the checkpoint.

    Attributes:
        num_drafts: draft tokens compared, each by the logits of the whole vocabulary.
        difference: the largest of a logit, to the same weights rounded in memory.
        rounding: the largest of a logit, to the float32 weights.
        num_changed: draft tokens whose greedy choice the rounding changes.
    """

    num_drafts: int
    difference: float
    rounding: float
    num_changed: int

    def __str__(self) -> str:
        return (
            f"{self.num_drafts} drafts on held-out rows: logits within {self.difference:.2g} of the checkpoint's in bfloat16\n"
            f"rounding to bfloat16 moves a logit by up to {self.rounding:.2g} and changes {self.num_changed} greedy drafts"
        )


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
            CheckpointError: a logit differs by more than the order of sums explains; both numbers are named.
        """
        drafter = read_drafter(folder)
        found = self._logits(drafter.build(self._config), drafter.on(self._config))
        rounded = self._logits(self._model({name: weight.bfloat16().float() for name, weight in self._weights.items()}))
        difference, allowed = float((found - rounded).abs().max()), _TOLERANCE * float(rounded.abs().max())
        if not difference <= allowed:  # a NaN is no agreement
            raise CheckpointError(f"{folder}: a logit differs by {difference:.3g}, needed at most {allowed:.3g}; refused")
        trained = self._logits(self._model(self._weights))
        changed = (found.argmax(1) != trained.argmax(1)).sum()
        return Comparison(len(found), difference, float((found - trained).abs().max()), int(changed))

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


def read_batch(config: Config, num_rows: int, device: torch.device) -> PackedBatch:
    """Held-out rows and the target's hidden states of them, packed as a drafter trains on them, in float32."""
    source: Dataset | HeldOut = HeldOut.open(config.data)
    if not source.num_samples:
        source = Dataset.open(Path(config.data.path).expanduser(), damaged=config.data.skip_damaged)
    samples = [source.read(sample_id) for sample_id in range(min(num_rows, source.num_samples))]
    return pack_features(config, [sample.input_ids for sample in samples], [sample.loss_mask for sample in samples], device)
