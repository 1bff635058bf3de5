"""Training: the sequence of the run, group by group, on this rank's share of the batches."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import torch
import torch.nn.functional as F

from common import faults
from common.board import Phase
from common.config import Config
from common.errors import TrainingDivergedError
from common.lifecycle import Actor, StoppedError
from common.messages import BatchInfo
from common.stopwatch import Stopwatch
from services.drafter.anchors import choose_blocks
from services.drafter.evaluator import Evaluator
from services.drafter.fetch import Fetched, Fetcher
from services.drafter.flops import batch_flops
from services.drafter.group import Group, GroupBrokenError
from services.drafter.journal import Journal, StepCost, StepFigures
from services.drafter.noise import add_noise
from services.drafter.optimizer import learning_rate
from services.drafter.profiler import StepProfiler
from services.drafter.quarantine import BatchFacts, QuarantinedStep, collect_facts, quarantine
from services.drafter.snapshots import Snapshots
from services.drafter.step import PackedBatch, block_loss
from services.drafter.trainee import Trainee

_NOWHERE = -1
log = logging.getLogger(__name__)


class Trainer:
    """One rank of the data-parallel training; all ranks hold the same weights after every step."""

    def __init__(
        self,
        actor: Actor,
        config: Config,
        trainee: Trainee,
        evaluator: Evaluator,
        snapshots: Snapshots,
        group: Group,
    ) -> None:
        self._actor = actor
        self._config = config
        self._model, (self._embedding, self._head), self._optimizer = trainee
        self._evaluator = evaluator
        self._snapshots = snapshots
        self._group = group
        self._journal = Journal(self._embedding.device, len(trainee.optimizer.gradients.sums), config.accumulation)
        self._profiler = StepProfiler(actor.run_dir / "profile" / f"{actor.name}.json", config.train.profile_steps)
        self._evaluated_at = _NOWHERE  # the position right after the last evaluation
        self._position = _NOWHERE  # the first batch of the sequence that is not in the weights
        self._is_half_taken = False  # the weights are neither this rank's nor another's
        self._waited_s = 0.0
        self._num_skipped = 0  # in a row
        self._step = _NOWHERE  # the last one that this or another rank made since the run was resumed
        self._stop_requested = False  # by any rank, so all know it at the same step

    def run(self, fetcher: Fetcher) -> None:
        """To the end of the sequence, over every death among the ranks.

        Raises:
            StoppedError: told to stop; the checkpoint is on disk.
            TrainingDivergedError: too many steps in a row were not finite.
        """
        while True:
            try:
                self._group.join()
                self._share_state()
                if self._stop_requested:
                    self._stop_between_steps()
                fetcher.start(self._position)
                self._actor.notices.phase(Phase.READY)
                self._train(fetcher)
                break
            except GroupBrokenError as error:
                log.warning("the group broke at batch %d: %s", self._position, error)
                self._report(self._journal.flush())
                fetcher.stop()
                self._group.leave()
                self._optimizer.gradients.abandon()
        fetcher.stop()
        self._profiler.close()
        self._save(self._optimizer.num_steps, required=True)
        self._snapshots.export(self._model, self._optimizer)

    def _share_state(self) -> None:
        """All ranks go on from the one that is furthest; from disk only where none holds the run in memory."""
        positions = self._group.collect(self._position)
        self._stop_requested = any(self._group.collect(self._stop_requested or self._actor.stopping))
        furthest = max(positions)
        if furthest == _NOWHERE:
            self._resume()
        elif min(positions) < furthest:
            self._hand_over(positions.index(furthest), furthest)

    def _resume(self) -> None:
        self._position = self._snapshots.resume(self._model, self._optimizer)
        if self._position == 0 and self._is_half_taken:
            raise RuntimeError("the rank that gave its state died on the way, and there is no checkpoint: start afresh")

    def _hand_over(self, source: int, position: int) -> None:
        """Rank `source` gives its state to all others, which have none until they have all of it."""
        before = self._position
        if self._actor.index != source:
            self._position, self._is_half_taken = _NOWHERE, True
        numbers = [self._num_skipped, self._evaluator.step, self._evaluated_at, self._step]
        counts = torch.tensor(numbers, device=self._embedding.device)
        state = self._optimizer.state_dict()
        self._group.copy_from(source, [*state.values(), counts, self._evaluator.rounds])
        self._optimizer.load_state_dict(state)
        self._num_skipped, self._evaluator.step, self._evaluated_at, self._step = counts.tolist()
        self._snapshots.evaluation = self._evaluator.result() or self._snapshots.evaluation
        self._position, self._is_half_taken = position, False
        self._keep_if_best()
        log.info("rank %d gave its state: batch %d -> %d", source, before, position)

    def _stop_between_steps(self) -> None:
        """Leave without another step: the supervisor calls a group that is stopping where no target can serve it."""
        if self._step != _NOWHERE:  # else all there is to save came from the disk
            self._save(self._step, required=True)
        raise StoppedError

    def _train(self, fetcher: Fetcher) -> None:
        while first := self._next(fetcher):
            if first.info.kind == "train":
                self._train_step(fetcher, first)
            else:
                self._evaluate(fetcher, first)
            done = first.info.step + (first.info.kind == "train")
            due = first.info.kind == "train" and done % self._config.checkpoint.every_steps == 0
            if due or self._stop_requested:
                self._save(done, required=self._stop_requested)
            if self._stop_requested:
                raise StoppedError

    def _train_step(self, fetcher: Fetcher, first: Fetched) -> None:
        step = first.info.step + 1
        self._profiler.before(step)
        watch = Stopwatch(self._embedding.device)
        done = [
            self._accumulate(fetched.batch, fetched.info, is_last=place == self._config.accumulation - 1)
            for place, fetched in enumerate(self._places(fetcher, first))
            if fetched.batch is not None
        ]
        watch.lap("forward_backward_s")
        self._optimizer.gradients.sums[-1] = float(self._actor.stopping)
        self._optimizer.gradients.reduce(self._group.begin)
        self._group.order()
        watch.lap("reduce_s")
        self._group.finish()
        watch.lap("commit_s")
        faults.reach("drafter.before_step")
        result = self._optimizer.step(first.info.step)
        watch.lap("optimizer_s")
        self._profiler.after(step)
        self._position += self._config.plan.batches_per_step
        self._step = step
        cost = StepCost(sum(num_tokens for _, num_tokens, _ in done), sum(flops for *_, flops in done))
        self._report(self._journal.push(step, result, watch, cost, [facts for facts, *_ in done]))

    def _accumulate(self, batch: PackedBatch, info: BatchInfo, *, is_last: bool) -> tuple[BatchFacts, int, float]:
        """Forward and backward of one batch; returns its facts, its tokens and its floating-point operations."""
        rows = batch.input_ids, batch.loss_mask, batch.cu_seqlens, batch.sample_ids
        blocks = choose_blocks(*rows, info.epoch, self._config)
        noisy = add_noise(batch.hidden_states, batch.cu_seqlens, batch.sample_ids, info.epoch, self._config)
        noised = replace(batch, hidden_states=noisy)
        sums = block_loss(self._model, self._embedding, self._head, noised, blocks, self._config)
        self._optimizer.gradients.accumulate(F.pad(sums, (0, 1)), self._group.begin if is_last else None)
        num_tokens, flops = len(batch.input_ids), batch_flops(self._config, blocks, batch.cu_seqlens)
        self._actor.notices.add(num_batches=1, num_tokens=num_tokens)
        return collect_facts(info.batch, batch.sample_ids.tolist(), batch.hidden_states, sums), num_tokens, flops

    def _evaluate(self, fetcher: Fetcher, first: Fetched) -> None:
        """A whole evaluation, of one or more groups of batches: one place in the life of the run."""
        self._evaluator.begin()
        num_places = 0
        group: Fetched | None = first
        while group is not None:
            for fetched in self._places(fetcher, group):
                if fetched.batch is not None:
                    self._evaluator.add(fetched.batch)
            num_places += self._config.plan.batches_per_step
            group = None if group.info.closes else self._next(fetcher)
        self._stop_requested = self._evaluator.close(self._group.add_up, first.info.step, self._actor.stopping)
        evaluation = self._snapshots.evaluation = self._evaluator.result()
        assert evaluation is not None
        self._position += num_places
        self._evaluated_at = self._position
        self._actor.notices.show_acceptance(evaluation.acceptance)
        self._actor.metrics.write(**msgspec.structs.asdict(evaluation))
        self._keep_if_best()

    def _keep_if_best(self) -> None:
        """Right after an evaluation the weights are those it measured: their checkpoint learns of it, or the best gets one."""
        if self._position == self._evaluated_at and self._snapshots.is_worth_keeping():
            self._save(self._evaluator.step, required=False)

    def _places(self, fetcher: Fetcher, first: Fetched) -> Iterator[Fetched]:
        """This rank's places of a group, each recycled when the caller asks for the next."""
        yield first
        fetcher.recycle(first)
        for _ in range(self._config.accumulation - 1):
            fetched = self._next(fetcher)
            assert fetched is not None, "a group is never cut by the end of the sequence"
            yield fetched
            fetcher.recycle(fetched)

    def _next(self, fetcher: Fetcher) -> Fetched | None:
        began = time.monotonic()
        fetched = fetcher.next(self._group.check)
        self._waited_s += time.monotonic() - began
        self._actor.notices.progress()
        return fetched

    def _save(self, step: int, *, required: bool) -> None:
        self._report(self._journal.flush())
        self._snapshots.save(self._model, self._optimizer, step, self._position, required=required)

    def _report(self, figures: StepFigures | None) -> None:
        """Write the figures of a step and act on what all ranks read in them."""
        if figures is None:
            return
        train, num_steps = self._config.train, self._optimizer.num_steps
        num_blocks, step_s = figures.num_labels[0], sum(figures.laps_s.values())
        self._stop_requested |= figures.stop_requested
        self._actor.notices.show_step(figures.step, num_steps, figures.loss, figures.num_skipped)
        self._actor.metrics.write(
            step=figures.step,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            learning_rate=learning_rate(figures.step - 1, num_steps, train.learning_rate, train.warmup_ratio),
            accuracy_per_slot=[c / n if n else 0.0 for c, n in zip(figures.num_correct, figures.num_labels, strict=True)],
            block_acceptance=1.0 + figures.num_accepted / num_blocks if num_blocks else 0.0,
            skipped=figures.skipped,
            **figures.laps_s,
            tokens_per_s=figures.cost.num_tokens / step_s,
            tflops=figures.cost.flops / step_s * 1e-12,
            waiting_s=self._waited_s,
            time_s=time.time(),
        )
        self._waited_s = 0.0
        self._num_skipped = self._num_skipped + 1 if figures.skipped else 0
        if figures.skipped:
            self._quarantine(figures)
        if self._num_skipped > train.max_nonfinite_steps:
            raise TrainingDivergedError(
                f"step {figures.step}: {self._num_skipped} steps in a row had a loss or gradient that is not finite "
                f"(train.max_nonfinite_steps = {train.max_nonfinite_steps}); see {self._actor.run_dir / 'quarantine'}"
            )

    def _quarantine(self, figures: StepFigures) -> None:
        step = QuarantinedStep(
            step=figures.step,
            rank=self._actor.index,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            batches=figures.batches,
        )
        quarantine(self._actor.run_dir, step)
