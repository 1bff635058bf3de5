"""Gradients of a step: added up over batches, and over ranks while the backward pass is still running."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from services.drafter.model.step_sums import StepSums

_BUCKET_ELEMENTS = 1 << 25  # 128 MiB: far larger than the size from which an all-reduce runs at full speed
_ALIGNMENT = 64  # elements: kernels are faster on aligned addresses
Begin = Callable[[Tensor], object]  # start an in-place all-reduce of a tensor


class Gradients:
    """One flat float32 buffer, sums first; a backward pass moves each gradient there as soon as it is computed.

    Backward passes reach the last parameters first. So the buffer is cut into buckets from its end, and in a rank's last
    batch of a step the all-reduce of a bucket starts once the bucket is complete. All ranks start the same buckets in the
    same order, however many batches they have; the bucket with the sums is always the last.
    """

    def __init__(self, parameters: list[nn.Parameter], num_sums: int, bucket_elements: int = _BUCKET_ELEMENTS) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        first = -(-num_sums // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.zeros(first + sum(sizes), device=parameters[0].device)
        self.sums, self.flat = StepSums(buffer[:num_sums]), buffer[first:]
        pieces = self.flat.split_with_sizes(sizes)
        self._views = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]
        self._parameters = parameters
        self._bucket_of, self._buckets = _cut(buffer, sizes, bucket_elements)
        self._begin: Begin | None = None
        self._num_begun = self._num_taken = 0
        self.abandon()
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))  # type: ignore[no-untyped-call]

    def accumulate(self, sums: StepSums, begin: Begin | None = None) -> None:
        """Run the backward pass of `sums.loss`, and add up the sums.

        `begin` is given with the last batch of this rank's step: the all-reduces begin during the backward pass.
        """
        self.sums.values.add_(sums.values.detach())
        self._begin, self._num_taken = begin, 0
        torch.autograd.backward(sums.loss)
        assert self._num_taken == len(self._parameters), "a backward pass reaches every parameter"
        self._is_empty, self._begin = False, None

    def reduce(self, begin: Begin) -> None:
        """Start the all-reduce of every bucket that is not started; a rank may have accumulated nothing."""
        if self._is_empty:
            self.flat.zero_()
        for bucket in self._buckets[self._num_begun :]:
            begin(bucket)
        self._num_begun = len(self._buckets)

    def abandon(self) -> None:
        """Empty the buffer for the next step, after a step or instead of it."""
        self.sums.values.zero_()
        self._is_empty = True  # the buffer may still hold the last step's gradients; the first batch overwrites them
        self._begin, self._num_begun = None, 0
        self._num_missing = [self._bucket_of.count(bucket) for bucket in range(len(self._buckets))]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _take(self, index: int, parameter: Tensor) -> None:
        """Move a gradient to the buffer, as a hook of the backward pass."""
        assert parameter.grad is not None
        add = torch._foreach_copy_ if self._is_empty else torch._foreach_add_  # copy_ to another type: half the speed
        add([self._views[index]], [parameter.grad])
        parameter.grad = None
        self._num_taken += 1
        if self._begin is not None:
            self._num_missing[self._bucket_of[index]] -= 1
            while self._num_begun < len(self._buckets) - 1 and self._num_missing[self._num_begun] == 0:
                self._num_begun += 1
                self._begin(self._buckets[self._num_begun - 1])


def _cut(buffer: Tensor, sizes: list[int], bucket_elements: int) -> tuple[list[int], list[Tensor]]:
    """Return the bucket number of every parameter, and the buckets, the last part of the buffer first."""
    bucket_of, edges, filled = [0] * len(sizes), [len(buffer)], 0
    for index in reversed(range(len(sizes))):
        if filled >= bucket_elements:
            edges.append(edges[-1] - filled)
            filled = 0
        bucket_of[index] = len(edges) - 1
        filled += sizes[index]
    edges.append(0)
    return bucket_of, [buffer[start:end] for end, start in pairwise(edges)]
