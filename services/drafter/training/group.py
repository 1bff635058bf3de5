"""The drafters as one group: the same weights on every rank, one sum of gradients per step, and no death is the end.

When a rank dies, the supervisor calls for a new life of the group. The survivors keep their state in
memory, leave what they were doing, and come; the newcomer comes too; the one that is furthest gives
its state to the others.

    join --> train --> a rank died: GroupBrokenError --> join --> share state --> train ...

The process group objects are made and dropped here directly: torch's global default group cannot be
made again reliably after an abort (pytorch issue 151159).
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
_NEW_LIFE_TIMEOUT_S = 60
_COLLECTIVE_TIMEOUT_S = 24 * 3600  # a silent rank is the supervisor's to judge
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
    """A rank died; what was under way is void and the group forms anew."""


class Group:
    """This rank's place among the drafters. A group of one needs nobody, and breaks only where it is called to stop."""

    def __init__(self, actor: Actor, device: torch.device) -> None:
        self._actor = actor
        self._device = device
        self._rank = actor.index
        self._size = actor.config.num_drafters
        self._life = 0
        self._backend: Any = None  # a process group; the stubs of torch lack its methods
        self._works: deque[dist.Work] = deque()  # begun, in order

    def join(self) -> None:
        """Come to a life of the group that was not joined yet; returns when all ranks have come."""
        self.leave()
        if self._size == 1:
            self._life = self._actor.board.group
        while self._size > 1 and self._backend is None:
            self._life = self._await_new_life()
            self._actor.notices.come_to_group(self._life)
            log.info("group life %d: waiting for %d ranks", self._life, self._size)
            if self._all_have_come():
                self._form()
        log.info("group life %d: all ranks have come", self._life)

    def leave(self) -> None:
        """Drop the process group; when it returns, nothing that was still under way in it writes any more."""
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
        """Raise GroupBrokenError where the supervisor has called for a new life."""
        if self._actor.board.group != self._life:
            raise GroupBrokenError("called together anew")

    def begin(self, values: torch.Tensor) -> None:
        """Begin to replace `values` by their sum over all ranks, which begin the same sums in the same order.

        Raises:
            GroupBrokenError: a rank died; `values` are void, here and in the methods below.
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
        """Wait on the host until all that has begun is whole, so that nothing is computed from half a sum.

        After a death nccl leaves garbage behind and says that its work is completed, and what was launched behind it
        runs: nothing on the device can tell. So what must not see garbage is launched when the sums are whole. That costs
        the device one launch latency, the forward after it none: it is launched while the optimizer runs.
        """
        self.order()
        summed = mark_computation(self._device)
        if self._backend is not None and not summed.reached():
            with self._actor.notices.collective():
                while not summed.reached():
                    self.check()
                    time.sleep(_GPU_POLL_S)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Replace `values` by their sum over all ranks; when it returns, the sum is whole."""
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

    def _await_new_life(self) -> int:
        """The supervisor calls for one as soon as it has taken the end of the rank that died."""
        deadline = time.monotonic() + _NEW_LIFE_TIMEOUT_S
        while (life := self._actor.board.group) == self._life:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the group broke, and nobody died within {_NEW_LIFE_TIMEOUT_S} s")
            self._wait()
        return life

    def _all_have_come(self) -> bool:
        """Wait until every rank has joined this group; return False if the group was replaced meanwhile."""
        first = self._actor.args.record - self._rank
        while self._actor.board.group == self._life:
            if all(self._actor.board.read(first + rank).group == self._life for rank in range(self._size)):
                return True
            self._wait()
        return False

    def _wait(self) -> None:
        self._actor.keep_waiting()
        time.sleep(_POLL_S)

    def _form(self) -> None:
        meeting = self._actor.run_dir / RENDEZVOUS
        meeting.mkdir(exist_ok=True)
        store = FileStore(str(meeting / f"group-{self._life}"), self._size)
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
            log.warning("group life %d did not form: %s", self._life, error)
            self.leave()

    def _connect(self, connect: Callable[[], T]) -> T:
        """Run `connect` in a thread of its own: where a rank dies on the way it does not return for a long time.

        The thread is left behind when the life is over. It shares nothing with the next one, which meets in another file
        and on other ports, and it gives up by itself after the forming timeout (gloo) or when `leave` aborts (nccl).
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
        """Connect with all ranks over the loopback interface."""
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
    """Turn the errors of a backend into GroupBrokenError: a rank died."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBrokenError(str(error)) from error
