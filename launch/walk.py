"""The held-out acceptance of a drafter folder, measured as training measures it: the exact walk, without decoding.

    python -m launch.walk RUN [--drafter DIR]

DIR may have any layout that `draft.init` reads; without it, it is `<run>/export`. Batches, padding and the type
of the hidden states in transit are those of the run, so the same weights give the same number.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from common import config as configuration
from common.acceptance import Evaluation
from common.config import Config
from common.data.held_out import HeldOut
from common.errors import DataError, HeadraceError
from launch.arguments import parse_device
from launch.decoding.target_features import TargetFeatures
from launch.operate.summary import describe_evaluation
from services.drafter.folder.drafter_folder import load_drafter
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.model import DraftModel
from services.drafter.model.step import PackedBatch
from services.drafter.training.evaluator import Evaluator
from services.exchange.samples import read_run_data
from services.target.rows import read_rows


def walk(run_dir: Path, config: Config, model: DraftModel, device: torch.device) -> Evaluation:
    """Measure a draft model on the evaluation sets of a run; its step reads 0.

    Raises:
        HeadraceError: the target or the data are missing or damaged, or nothing is held out.
    """
    evaluator = Evaluator(model.to(device), load_embedding_and_head(config, device), config)
    for batch in held_out_batches(run_dir, config, device):
        evaluator.add(batch)
    rounds, _ = evaluator.close(lambda values: values, stopping=False)
    return evaluator.summarise(rounds, step=0)


def held_out_batches(run_dir: Path, config: Config, device: torch.device) -> Iterator[PackedBatch]:
    """The batches of one evaluation of the run, as its drafters get them."""
    held_out = HeldOut.open(config.data)
    if not held_out.num_samples:
        raise DataError("data.eval_path: needed an evaluation data set, found none")
    plan, _ = read_run_data(config, run_dir).plan(config)
    features = TargetFeatures(config, device, getattr(torch, config.ring.dtype))
    for place in range(plan.num_batches):
        info = plan.info(place)
        if info.kind != "eval" or info.step > 0:
            break
        if sample_ids := plan.sample_ids(place):
            yield features.pack(read_rows(held_out, sample_ids, config.plan.bucket_lengths))


def main() -> int:
    """Read the command line; 0 done, 2 refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="default: RUN/export")
    parser.add_argument("--device", type=parse_device, default="cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the CPU (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"--threads: needed at least 1, found {arguments.threads}")
    torch.set_num_threads(arguments.threads)
    try:
        config = configuration.read(arguments.run)
        model = load_drafter(arguments.drafter or arguments.run / "export", config)
        evaluation = walk(arguments.run, config, model, arguments.device)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"held-out acceptance length             {evaluation.acceptance:.3f} in {evaluation.num_rounds:,} rounds")
    print(f"  with another prompt's hidden states  {evaluation.acceptance_other_prompt:.3f}")
    print("\n".join(describe_evaluation(evaluation)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
