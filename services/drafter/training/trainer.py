"""Training: run the sequence of the plan, group by group of batches, on this rank's share."""

import logging
import time
from collections.abc import Iterator

import msgspec

from common.actor import faults
from common.actor.board import Phase
from common.actor.lifecycle import Actor, StoppedError
from common.actor.messages import BatchInfo
from common.device.stopwatch import Stopwatch
from common.errors import TrainingDivergedError
from common.run_dir import PROFILE, QUARANTINE
from services.drafter.model.anchors import choose_blocks
from services.drafter.model.batch import PackedBatch
from services.drafter.model.flops import batch_flops
from services.drafter.model.loss import selector_weight
from services.drafter.model.noise import add_noise
from services.drafter.model.step import block_loss
from services.drafter.training.evaluator import Evaluator
from services.drafter.training.fetch import Fetched, Fetcher
from services.drafter.training.group import Group, GroupBrokenError
from services.drafter.training.optimizer import learning_rate
from services.drafter.training.profiler import StepProfiler
from services.drafter.training.quarantine import BatchFacts, collect_facts, quarantine
from services.drafter.training.resume import Checkpointer
from services.drafter.training.run_state import UNKNOWN, RunState
from services.drafter.training.step_metrics import MetricsReadback, StepCost, StepMetrics
from services.drafter.training.training_state import TrainingState

log = logging.getLogger(__name__)


class Trainer:
    """One rank of the data-parallel training; all ranks hold equal weights after every step."""

    def __init__(
        self,
        actor: Actor,
        state: TrainingState,
        run: RunState,
        evaluator: Evaluator,
        checkpointer: Checkpointer,
        group: Group,
        fetcher: Fetcher,
    ) -> None:
        self._actor = actor
        self._config = config = actor.config
        self._state = state
        self._optimizer = state.optimizer
        self._run = run
        self._evaluator = evaluator
        self._checkpointer = checkpointer
        self._group = group
        self._fetcher = fetcher
        num_sums, with_selector = len(state.optimizer.gradients.sums.values), config.draft.kind == "dflash2"
        self._metrics = MetricsReadback(state.device, num_sums, config.accumulation, with_selector=with_selector)
        self._profiler = StepProfiler(actor.run_dir / PROFILE / f"{actor.name}.json", config.train.profile_steps)
        self._waited_s = 0.0
        self._stop_requested = False  # by any rank, so all know it at the same step

    #   +-> join the group       wait until all ranks have joined
    #   |     v
    #   |   share the state      no rank has a position: resume from disk; else the rank that is ahead sends its state
    #   |     v
    #   |   train                group by group: a step or an evaluation, then a checkpoint if one is due
    #   |     |            |
    #   +-----+            +-> save and export, at the end of the sequence
    #   GroupBrokenError:
    #   a rank died
    #
    # RunState.position advances only when a step or evaluation is complete on this rank, so it shows which rank is ahead.
    def run(self) -> None:
        """Train to the end of the sequence; when a rank dies, wait for its successor and go on.

        Raises:
            StoppedError: a stop was requested; the checkpoint is on disk.
            TrainingDivergedError: too many steps in a row were not finite.
        """
        while True:
            try:
                self._group.join()
                self._share_state()
                if self._stop_requested:
                    self._stop_between_steps()
                self._fetcher.start(self._run.position)
                self._actor.notices.phase(Phase.READY)
                self._train()
                break
            except GroupBrokenError as error:
                log.warning("the group broke at batch %d: %s", self._run.position, error)
                self._report(self._metrics.flush())
                self._fetcher.stop()
                self._group.leave()
                self._optimizer.gradients.abandon()
        self._fetcher.stop()
        self._profiler.close()
        self._save(self._optimizer.num_steps, required=True)
        self._checkpointer.export(self._optimizer, self._run)

    def _share_state(self) -> None:
        """Bring all ranks to the highest position among them; read the disk only if no rank has a position."""
        positions = self._group.collect(self._run.position)
        self._stop_requested = any(self._group.collect(self._stop_requested or self._actor.stopping))
        furthest = max(positions)
        if furthest == UNKNOWN:
            self._run.resume(*self._checkpointer.resume(self._optimizer))
        elif min(positions) < furthest:
            self._transfer(positions.index(furthest))

    def _transfer(self, source: int) -> None:
        """Send the state of rank `source` to all ranks; the weights of the others are unusable until it is complete."""
        before = self._run.position
        if self._actor.index != source:
            self._run.begin_transfer()
        optimizer, run = self._optimizer.state_dict(), self._run.state_dict()
        self._group.copy_from(source, [*optimizer.values(), *run.values()])
        self._optimizer.load_state_dict(optimizer)
        self._run.load_state_dict(run)
        self._keep_if_best()
        log.info("rank %d sent its state: batch %d -> %d", source, before, self._run.position)

    def _stop_between_steps(self) -> None:
        """Stop without another step: the supervisor re-forms a group that is stopping when no target can serve it."""
        if self._run.step != UNKNOWN:  # else the disk already holds the state
            self._save(self._run.step, required=True)
        raise StoppedError

    def _train(self) -> None:
        while first := self._next():
            is_step = first.info.kind == "train"
            if is_step:
                self._train_step(first)
            else:
                self._evaluate(first)
            done = first.info.step + is_step
            if (is_step and done % self._config.checkpoint.every_steps == 0) or self._stop_requested:
                self._save(done, required=self._stop_requested)
            if self._stop_requested:
                raise StoppedError

    def _train_step(self, first: Fetched) -> None:
        step = first.info.step + 1
        self._profiler.before(step)
        watch = Stopwatch(self._state.device)
        done = [
            self._accumulate(fetched.batch, fetched.info, is_last=index == self._config.accumulation - 1)
            for index, fetched in enumerate(self._share(first))
            if fetched.batch is not None
        ]
        watch.lap("forward_backward_s")
        self._optimizer.gradients.sums.stop.fill_(float(self._actor.stopping))
        self._optimizer.gradients.reduce(self._group.begin)
        self._group.order()
        watch.lap("reduce_s")
        self._group.finish()
        watch.lap("commit_s")
        faults.reach("drafter.before_step")
        result = self._optimizer.step(first.info.step)
        watch.lap("optimizer_s")
        self._profiler.after(step)
        self._run.position += self._config.plan.batches_per_step
        self._run.step = step
        cost = StepCost(sum(num_tokens for _, num_tokens, _ in done), sum(flops for *_, flops in done))
        self._report(self._metrics.push(step, result, watch, cost, [facts for facts, *_ in done]))

    def _accumulate(self, batch: PackedBatch, info: BatchInfo, *, is_last: bool) -> tuple[BatchFacts, int, float]:
        """Run forward and backward of one batch; returns its facts, tokens and floating-point operations."""
        blocks, noisy = choose_blocks(batch, info.epoch, self._config), add_noise(batch, info.epoch, self._config)
        weight = selector_weight(info.step, self._optimizer.num_steps, self._config.train)
        sums = block_loss(self._state.model, *self._state.frozen, noisy, blocks, self._config, weight)
        self._optimizer.gradients.accumulate(sums, self._group.begin if is_last else None)
        num_tokens, flops = len(batch.input_ids), batch_flops(self._config, blocks, batch.cu_seqlens)
        self._actor.notices.add(num_batches=1, num_tokens=num_tokens)
        return collect_facts(info.batch, batch.sample_ids.tolist(), batch.hidden_states, sums), num_tokens, flops

    def _evaluate(self, first: Fetched) -> None:
        """Run an evaluation of one or more groups of batches. A broken group repeats all of it."""
        self._evaluator.begin()
        num_batches = 0
        group: Fetched | None = first
        while group is not None:
            for fetched in self._share(group):
                if fetched.batch is not None:
                    self._evaluator.add(fetched.batch)
            num_batches += self._config.plan.batches_per_step
            group = None if group.info.closes else self._next()
        rounds, self._stop_requested = self._evaluator.close(self._group.add_up, stopping=self._actor.stopping)
        self._run.position += num_batches
        evaluation = self._run.record_evaluation(rounds, first.info.step)
        self._actor.notices.show_acceptance(evaluation.acceptance)
        self._actor.metrics.write(**msgspec.structs.asdict(evaluation))
        self._keep_if_best()

    def _keep_if_best(self) -> None:
        """Right after an evaluation, add it to the checkpoint of the weights, or save the weights if they are the best."""
        evaluation = self._run.evaluation
        if evaluation is not None and self._run.is_just_evaluated and self._checkpointer.is_worth_keeping(evaluation):
            self._save(evaluation.step, required=False)

    def _share(self, first: Fetched) -> Iterator[Fetched]:
        """Yield this rank's batches of a group; each is recycled when the caller takes the next."""
        yield first
        self._fetcher.recycle(first)
        for _ in range(self._config.accumulation - 1):
            fetched = self._next()
            assert fetched is not None, "a group is never cut by the end of the sequence"
            yield fetched
            self._fetcher.recycle(fetched)

    def _next(self) -> Fetched | None:
        began = time.monotonic()
        fetched = self._fetcher.next(self._group.check)
        self._waited_s += time.monotonic() - began
        self._actor.notices.progress()
        return fetched

    def _save(self, step: int, *, required: bool) -> None:
        self._report(self._metrics.flush())
        self._checkpointer.save(self._optimizer, self._run, step, required=required)

    def _report(self, metrics: StepMetrics | None) -> None:
        """Write the metrics of a step and act on them; all ranks read the same numbers."""
        if metrics is None:
            return
        train, num_steps = self._config.train, self._optimizer.num_steps
        self._stop_requested |= metrics.stop_requested
        self._actor.notices.show_step(metrics.step, num_steps, metrics.loss, metrics.num_skipped)
        rate = learning_rate(metrics.step - 1, num_steps, train.learning_rate, train.warmup_ratio)
        self._actor.metrics.write(**metrics.row(), learning_rate=rate, waiting_s=self._waited_s, time_s=time.time())
        self._waited_s = 0.0
        self._run.record_step(skipped=metrics.skipped)
        if metrics.skipped:
            quarantine(
                self._actor.run_dir,
                step=metrics.step,
                rank=self._actor.index,
                loss=metrics.loss,
                grad_norm=metrics.grad_norm,
                batches=metrics.batches,
            )
        if self._run.num_skipped > train.max_nonfinite_steps:
            raise TrainingDivergedError(
                f"step {metrics.step}: {self._run.num_skipped} steps in a row had a loss or gradient that is not finite "
                f"(train.max_nonfinite_steps = {train.max_nonfinite_steps}); see {self._actor.run_dir / QUARANTINE}"
            )
