"""The gradients of a step: added up over batches, and over the ranks while the backward pass still runs.

Shapes: P parameter elements in all.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from services.drafter.model.step_sums import StepSums

_BUCKET_ELEMENTS = 1 << 25  # 128 MiB: far above the size from which an all-reduce runs at full speed
_ALIGNMENT = 64  # elements: kernels are faster where they begin at a round address
Begin = Callable[[Tensor], object]  # begins to replace a tensor by its sum over all ranks


class Gradients:
    """One flat float32 buffer, sums first: a backward pass leaves a parameter's gradient there as soon as it has it.

    Backward passes come to the last parameters first. So the buffer is cut into buckets from its end, and in a rank's
    last batch of a step the sum of a bucket begins when all of it is there. All ranks begin the same sums in the same
    order, whatever they had to compute; the first bucket, with the sums, is always the last.
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
        for place, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take, place))  # type: ignore[no-untyped-call]

    def accumulate(self, sums: StepSums, begin: Begin | None = None) -> None:
        """Run the backward pass of `sums.loss`, and add up the sums.

        Args:
            sums: of one batch, with their graph.
            begin: given with the last batch of this rank's step: the sums over the ranks begin on the way.
        """
        self.sums.values.add_(sums.values.detach())
        self._begin, self._num_taken = begin, 0
        torch.autograd.backward(sums.loss)
        assert self._num_taken == len(self._parameters), "a backward pass reaches every parameter"
        self._is_empty, self._begin = False, None

    def reduce(self, begin: Begin) -> None:
        """Begin all sums over the ranks that have not begun; a rank may have accumulated nothing."""
        if self._is_empty:
            self.flat.zero_()
        for bucket in self._buckets[self._num_begun :]:
            begin(bucket)
        self._num_begun = len(self._buckets)

    def abandon(self) -> None:
        """Empty the buffer for the next step, whether this one was made or not."""
        self.sums.values.zero_()
        self._is_empty = True  # the gradients of the last step may still stand in the buffer
        self._begin, self._num_begun = None, 0
        self._num_missing = [self._bucket_of.count(bucket) for bucket in range(len(self._buckets))]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _take(self, place: int, parameter: Tensor) -> None:
        """Called by the backward pass when it has the gradient of a parameter."""
        assert parameter.grad is not None
        add = torch._foreach_copy_ if self._is_empty else torch._foreach_add_  # copy_ to another type: half the speed
        add([self._views[place]], [parameter.grad])
        parameter.grad = None
        self._num_taken += 1
        if self._begin is not None:
            self._num_missing[self._bucket_of[place]] -= 1
            while self._num_begun < len(self._buckets) - 1 and self._num_missing[self._num_begun] == 0:
                self._num_begun += 1
                self._begin(self._buckets[self._num_begun - 1])


def _cut(buffer: Tensor, sizes: list[int], bucket_elements: int) -> tuple[list[int], list[Tensor]]:
    """The bucket of every parameter, and the buckets, the last part of the buffer first."""
    bucket_of, edges, filled = [0] * len(sizes), [len(buffer)], 0
    for place in reversed(range(len(sizes))):
        if filled >= bucket_elements:
            edges.append(edges[-1] - filled)
            filled = 0
        bucket_of[place] = len(edges) - 1
        filled += sizes[place]
    edges.append(0)
    return bucket_of, [buffer[start:end] for end, start in pairwise(edges)]
