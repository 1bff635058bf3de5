"""Count the held-out acceptance of a draft model exactly, as training does: without decoding.

Batches, padding and the type of the hidden states in transit are those of the run, so equal weights give equal numbers.
"""

from collections.abc import Iterator

import torch

from common.acceptance import Evaluation
from common.config import Config
from common.data.held_out import HeldOut
from common.errors import DataError
from launch.decoding.target_features import TargetFeatures
from services.drafter.model.acceptance import AcceptanceCount
from services.drafter.model.batch import PackedBatch
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.model import DraftModel
from services.exchange.samples import read_run_data
from services.target.rows import read_rows


def count_acceptance(config: Config, model: DraftModel, device: torch.device) -> Evaluation:
    """Measure a draft model on the evaluation sets of a run; its step reads 0.

    Raises:
        HeadraceError: the target or the data are missing or damaged, or nothing is held out.
    """
    count = AcceptanceCount(model.to(device), load_embedding_and_head(config, device), config)
    for batch in held_out_batches(config, device):
        count.add(batch)
    return count.summarise(torch.from_numpy(count.rounds), step=0)


def held_out_batches(config: Config, device: torch.device) -> Iterator[PackedBatch]:
    """Yield the batches of the first evaluation of the run, as its drafters get them."""
    held_out = HeldOut.open(config.data)
    if not held_out.num_samples:
        raise DataError("data.eval_path: needed an evaluation data set, found none")
    plan, _ = read_run_data(config.data).plan(config)
    features = TargetFeatures(config, device, getattr(torch, config.ring.dtype))
    for batch in range(plan.num_batches):
        info = plan.info(batch)
        if info.kind != "eval" or info.step > 0:
            break
        if sample_ids := plan.sample_ids(batch):
            yield features.pack(read_rows(held_out, sample_ids, config.plan.bucket_lengths))
