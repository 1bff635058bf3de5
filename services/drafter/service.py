"""The drafter process: one rank of the training, fed from the rings of all targets."""

import logging
import time

import torch

from common.actor.board import Phase
from common.actor.lifecycle import Actor
from common.device.memory import take_device
from common.ring.layout import SlotLayout
from common.ring.ring import RingReader
from services.drafter.folder import checkpoint
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.loss import loss_head
from services.drafter.model.model import DraftModel
from services.drafter.training.evaluator import Evaluator
from services.drafter.training.fetch import Fetcher
from services.drafter.training.group import Group
from services.drafter.training.optimizer import MasterAdamW
from services.drafter.training.resume import Checkpointer
from services.drafter.training.run_state import RunState
from services.drafter.training.trainer import Trainer
from services.drafter.training.training_state import TrainingState
from services.drafter.training.warmup import warm_up

log = logging.getLogger(__name__)


def main(actor: Actor) -> None:
    """Run one drafter until the end of the training."""
    config = actor.config
    torch.set_num_threads(config.drafters.num_threads)
    device = take_device(config.drafters.devices[actor.index], "drafters.devices")
    layout = SlotLayout.of(config)
    rings = [RingReader(fd, layout, config.ring.num_slots) for fd in actor.args.ring_fds]
    began = time.monotonic()
    embedding, head = load_embedding_and_head(config, device)
    log.info("the target's embedding and head were loaded in %.1f s", time.monotonic() - began)
    model = DraftModel(config, device)
    welcome = actor.join()
    optimizer = MasterAdamW(model, config.train, welcome.num_steps, config.draft.block_size)
    log.info("draft model and optimizer are ready after %.1f s", time.monotonic() - began)
    state = TrainingState(model, (embedding, loss_head(head, config.train.head)), optimizer)
    checkpointer = Checkpointer(actor.run_dir, config, welcome, actor.index)
    if actor.index == 0:
        checkpoint.clean(actor.run_dir)
    fetcher = Fetcher(actor, rings, device, welcome.plan_hash)
    if device.type == "cuda":
        actor.notices.phase(Phase.WARMING_UP)
        warm_up(state, config, actor.check_stop)
    group = Group(actor, device)
    try:
        evaluator = Evaluator(model, (embedding, head), config)
        run = RunState(evaluator.make_rounds(), evaluator.summarise)
        Trainer(actor, state, run, evaluator, checkpointer, group, fetcher).run()
    finally:
        fetcher.stop()
        group.leave()
