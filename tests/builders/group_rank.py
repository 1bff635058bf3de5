"""One rank of a group of two that adds up and again adds up; a line of JSON says what came of it.

python tests/builders/group_rank.py RUN_DIR RANK BOARD_FD DEVICE
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from common.actor import faults
from common.actor.lifecycle import Actor
from services.drafter.model.anchors import choose_blocks
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_loss
from services.drafter.model.step_sums import StepSums
from services.drafter.training.gradients import Begin, Gradients
from services.drafter.training.group import Group, GroupBrokenError
from tests.builders.batches import frozen_weights, make_batch, make_config, metadata

NUM_ELEMENTS = 1 << 22
PAUSE_S = 0.05
BUCKET_ELEMENTS = 4096  # many buckets of a tiny model


def gradient_difference(group: Group, rank: int, device: torch.device) -> float:
    """Relative difference between the sum of both ranks' gradients and that of both batches on this rank alone."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    config = make_config(dtype=dtype, head_dim=16, anchors_per_batch=64)
    model = DraftModel(config).to(device)
    frozen = [weight.to(getattr(torch, dtype)) for weight in frozen_weights(device=str(device))]
    sizes = StepSums.size(config.draft.block_size), BUCKET_ELEMENTS
    gradients = Gradients(list(model.parameters()), *sizes)

    def accumulate(seed: int, begin: Begin | None = None) -> None:
        batch = make_batch([24, 17, 30], seed=seed, device=str(device))
        blocks = choose_blocks(*metadata(batch), batch.sample_ids, 0, config)
        sums = block_loss(model, frozen[0], frozen[1], batch, blocks, config)
        gradients.accumulate(sums, begin)

    for seed in range(2):
        accumulate(seed)
    alone = gradients.flat.clone()
    gradients.abandon()
    accumulate(rank, group.begin)
    gradients.reduce(group.begin)
    group.finish()
    return float((gradients.flat - alone).norm() / alone.norm())


def main() -> None:
    run_dir, rank, board_fd, device = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), torch.device(sys.argv[4])
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    faults.load(run_dir, f"drafter-{rank}")
    first_drafter = 3  # behind the exchange and two targets
    actor = Actor("drafter", argparse.Namespace(run_dir=run_dir, index=rank, record=first_drafter + rank, board_fd=board_fd))
    group = Group(actor, device)
    while True:
        try:
            group.join()
            print(json.dumps({"gradient_difference": gradient_difference(group, rank, device)}), flush=True)
            while True:
                total = group.add_up(torch.full((NUM_ELEMENTS,), 1.0 + rank, device=device))
                equal = bool((total == 3.0).all())
                print(json.dumps({"life": actor.board.group, "whole": equal, "time_s": time.monotonic()}), flush=True)
                time.sleep(PAUSE_S)
        except GroupBrokenError:
            print(json.dumps({"broken": True}), flush=True)


if __name__ == "__main__":
    main()
