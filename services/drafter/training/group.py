"""The drafters as one group: equal weights on every rank, one sum of gradients per step, and a new incarnation after a death.

When a rank dies, the supervisor starts a new incarnation of the group. The survivors keep their state in memory, abandon the
step, and join; the successor joins too; the rank that is furthest sends its state to the others.

    join --> train --> a rank died: GroupBrokenError --> join --> share state --> train ...

Process groups are made and dropped here directly: torch's global default group cannot be made again reliably after an abort
(pytorch issue 151159).
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from common.actor import faults
from common.actor.lifecycle import Actor
from common.device.copy_stream import mark_computation
from common.run_dir import RENDEZVOUS

_FORMING_TIMEOUT_S = 30
_INCARNATION_TIMEOUT_S = 60
_COLLECTIVE_TIMEOUT_S = 24 * 3600  # the supervisor, not a timeout, decides that a silent rank is dead
_POLL_S = 0.02
_GPU_POLL_S = 0.0001
_NCCL_SETTINGS = {  # torch reads them when a process group is made, and takes them from nowhere else
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # by default its watchdog ends the process where a peer has died
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # by default it first waits a minute, and the abort waits for it
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
T = TypeVar("T")
log = logging.getLogger(__name__)


class GroupBrokenError(Exception):
    """A rank died; the step in progress is void and the group forms anew."""


class Group:
    """The group as one rank uses it. A group of one has no collectives; only a stop by the supervisor breaks it."""

    def __init__(self, actor: Actor, device: torch.device) -> None:
        self._actor = actor
        self._device = device
        self._rank = actor.index
        self._size = actor.config.num_drafters
        self._incarnation = 0
        self._backend: Any = None  # a process group; the stubs of torch lack its methods
        self._works: deque[dist.Work] = deque()  # begun, in order

    def join(self) -> None:
        """Join the next incarnation of the group; returns when all ranks have joined."""
        self.leave()
        if self._size == 1:
            self._incarnation = self._actor.board.group
        while self._size > 1 and self._backend is None:
            self._incarnation = self._await_incarnation()
            self._actor.notices.come_to_group(self._incarnation)
            log.info("group incarnation %d: waiting for %d ranks", self._incarnation, self._size)
            if self._await_ranks():
                self._form()
        log.info("group incarnation %d: all ranks have joined", self._incarnation)

    def leave(self) -> None:
        """Drop the process group; when it returns, no collective of it writes any more."""
        if self._backend is not None:
            self._backend.abort()
            for work in self._works:
                with suppress(RuntimeError):
                    work.wait()
            self._works.clear()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._backend = None

    def check(self) -> None:
        """Raise GroupBrokenError if the supervisor has started a new incarnation."""
        if self._actor.board.group != self._incarnation:
            raise GroupBrokenError("a new incarnation of the group was started")

    def begin(self, values: torch.Tensor) -> None:
        """Begin to replace `values` by their sum over all ranks, which begin the same sums in the same order.

        Raises:
            GroupBrokenError: a rank died; `values` are void, here and in the methods that follow.
        """
        if self._backend is not None:
            self._launch(partial(self._backend.allreduce, [values]))

    def order(self) -> None:
        """Order later kernels behind the collectives that have begun; the host does not wait for a GPU."""
        if self._works:
            with self._actor.notices.collective(), _broken_group():
                faults.reach("drafter.mid_collective")
                while self._works:
                    self._works[0].wait()  # gloo waits here, nccl lets the stream wait
                    self._works.popleft()

    def finish(self) -> None:
        """Wait on the host until every collective that has begun is complete, so that nothing is computed from half a sum.

        After a death nccl leaves garbage behind and reports its work as completed, and kernels launched behind it run:
        nothing on the device can tell. So the optimizer is launched only when the sums are complete. That costs the device
        one launch latency, and none for the next forward: it is launched while the optimizer runs.
        """
        self.order()
        summed = mark_computation(self._device)
        if self._backend is not None and not summed.reached():
            with self._actor.notices.collective():
                while not summed.reached():
                    self.check()
                    time.sleep(_GPU_POLL_S)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Replace `values` by their sum over all ranks; when it returns, the sum is complete."""
        self.begin(values)
        self.finish()
        return values

    def copy_from(self, source: int, tensors: list[torch.Tensor]) -> None:
        """Overwrite `tensors` on every rank by those of rank `source`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        for tensor in tensors:
            faults.reach("drafter.mid_hand_over")
            if self._backend is not None:
                self._launch(partial(self._backend.broadcast, [tensor], options))
                self.finish()

    def collect(self, number: int) -> list[int]:
        """Return the number of every rank, in order of the ranks."""
        numbers = torch.zeros(self._size, dtype=torch.int64, device=self._device)
        numbers[self._rank] = number
        return [int(n) for n in self.add_up(numbers).tolist()]

    def _await_incarnation(self) -> int:
        """Wait for the supervisor, which starts an incarnation as soon as it has noticed the death of a rank."""
        deadline = time.monotonic() + _INCARNATION_TIMEOUT_S
        while (incarnation := self._actor.board.group) == self._incarnation:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the group broke, and no rank died within {_INCARNATION_TIMEOUT_S} s")
            self._wait()
        return incarnation

    def _await_ranks(self) -> bool:
        """Wait until every rank has joined this incarnation; return False if it was replaced meanwhile."""
        first = self._actor.args.record - self._rank
        while self._actor.board.group == self._incarnation:
            if all(self._actor.board.read(first + rank).group == self._incarnation for rank in range(self._size)):
                return True
            self._wait()
        return False

    def _wait(self) -> None:
        self._actor.keep_waiting()
        time.sleep(_POLL_S)

    def _form(self) -> None:
        meeting = self._actor.run_dir / RENDEZVOUS
        meeting.mkdir(exist_ok=True)
        store = FileStore(str(meeting / f"group-{self._incarnation}"), self._size)
        store.set_timeout(timedelta(seconds=_FORMING_TIMEOUT_S))
        try:
            faults.reach("drafter.before_connecting")
            if self._device.type == "cuda":
                self._backend, first = self._make_nccl(store), torch.zeros(1, device=self._device)
                self._connect(lambda: self._backend.allreduce([first]).wait())  # nccl connects in its first collective
            else:
                self._backend = self._connect(lambda: self._make_gloo(store))
            self.add_up(torch.zeros(1, device=self._device))
        except (RuntimeError, GroupBrokenError) as error:
            log.warning("group incarnation %d did not form: %s", self._incarnation, error)
            self.leave()

    def _connect(self, connect: Callable[[], T]) -> T:
        """Run `connect` in a thread of its own, because it does not return for a long time if a rank dies meanwhile.

        The thread is abandoned when the incarnation is replaced. It shares nothing with the next incarnation, which uses
        another file and other ports, and it ends by itself after the forming timeout (gloo) or when `leave` aborts (nccl).
        """
        connected = Future[T]()

        def run() -> None:
            try:
                connected.set_result(connect())
            except Exception as error:
                connected.set_exception(error)

        threading.Thread(target=run, name="connect", daemon=True).start()
        deadline = time.monotonic() + _FORMING_TIMEOUT_S
        while not connected.done():
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not connected within {_FORMING_TIMEOUT_S} s")
            self._wait()
        return connected.result()

    def _make_nccl(self, store: FileStore) -> Any:
        os.environ.update(_NCCL_SETTINGS)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_COLLECTIVE_TIMEOUT_S)
        return dist.ProcessGroupNCCL(store, self._rank, self._size, options)

    def _make_gloo(self, store: FileStore) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=_FORMING_TIMEOUT_S)
        backend: Any = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        backend._set_default_timeout(timedelta(seconds=_COLLECTIVE_TIMEOUT_S))
        return backend

    def _launch(self, start: Callable[[], dist.Work]) -> None:
        with _broken_group():
            self._works.append(start())


@contextmanager
def _broken_group() -> Iterator[None]:
    """Raise the errors of a backend as GroupBrokenError: a rank died."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBrokenError(str(error)) from error
