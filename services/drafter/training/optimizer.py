"""AdamW on float32 master weights, data parallel, deciding on the device whether a step counts.

Shapes: P parameter elements in all.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.config import TrainConfig
from services.drafter.kernels.fused import fused
from services.drafter.model.step_sums import StepSums
from services.drafter.training.gradients import Gradients

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def learning_rate(step: int, num_steps: int, peak: float, warmup_ratio: float) -> float:
    """Return the learning rate: linear warm-up, then a cosine to 0.

    The first step, 0, has the rate peak / num_warmup_steps; step num_steps would have 0.
    """
    num_warmup_steps = math.ceil(warmup_ratio * num_steps)
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


class StepResult(NamedTuple):
    """Results of one optimizer step, on the device; reading them waits for it."""

    loss: Tensor  # sums.loss / sums.weight over all ranks and batches of the step
    grad_norm: Tensor  # before clipping
    found_inf: Tensor  # 1.0 when the step was skipped, else 0.0
    sums: StepSums  # over all ranks and batches of the step
    num_counted: Tensor  # steps of the run that changed the weights, this one included


@fused
def adamw(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weights: Tensor,
    scale: Tensor,
    decay: Tensor,
    rate: Tensor,
    correction: Tensor,
    found_inf: Tensor,
) -> None:
    """Run AdamW (arXiv 1711.05101) in place, in one pass over memory on a GPU; if `found_inf` is not 0 nothing changes.

    Args:
        master, gradient, exp_avg, exp_avg_sq: float32 [P].
        weights: [P], set to the masters in the model's type.
        scale: scalar, by which the gradient is multiplied.
        decay: scalar, by which the masters are multiplied before the step.
        rate: scalar, the learning rate over the first bias correction.
        correction: scalar, the second bias correction.
    """
    keep, scaled = found_inf != 0, gradient * scale
    mean = exp_avg + (scaled - exp_avg) * (1.0 - BETA1)
    square = exp_avg_sq + (scaled * scaled - exp_avg_sq) * (1.0 - BETA2)
    updated = torch.where(keep, master, master * decay - rate * mean / ((square / correction).sqrt() + EPS))
    exp_avg.copy_(torch.where(keep, exp_avg, mean))
    exp_avg_sq.copy_(torch.where(keep, exp_avg_sq, square))
    master.copy_(updated)
    weights.copy_(updated)


class MasterAdamW:
    """Optimizer of one model, whose parameters become views of one flat tensor.

    A step is `gradients.accumulate` for each batch, then once `gradients.reduce` and, when the sums are complete, `step`.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, num_steps: int, block_size: int) -> None:
        self.train, self.num_steps = train, num_steps
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.weights = torch.cat([parameter.detach().flatten() for parameter in self._parameters.values()])
        for name, view in self._views(self.weights).items():
            self._parameters[name].data = view
        self.master = self.weights.float()
        self.gradients = Gradients(list(self._parameters.values()), StepSums.size(block_size))
        self.num_counted = torch.zeros((), device=self.master.device)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)

    @torch.no_grad()
    def step(self, step: int) -> StepResult:
        """Divide by the weight, clip, update masters and model, and empty the gradients, whose all-reduce must be finished.

        A loss or gradient norm that is not finite leaves weights and state bit for bit as they were; every rank sees
        the same reduced numbers and so decides the same. Nothing here waits for the device. The number of the step, from
        0, decides the learning rate only.
        """
        sums, gradient = self.gradients.sums, self.gradients.flat
        divisor = torch.where(sums.weight == 0, 1.0, sums.weight)
        loss, grad_norm = sums.loss / divisor, torch.linalg.vector_norm(gradient) / divisor
        found_inf = (~(loss.isfinite() & grad_norm.isfinite())).float()
        num_counted = self.num_counted + (1.0 - found_inf)
        result = StepResult(loss, grad_norm, found_inf, StepSums(sums.values.clone()), num_counted)

        scale = (self.train.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0) / divisor
        rate = learning_rate(step, self.num_steps, self.train.learning_rate, self.train.warmup_ratio)
        decay = torch.full_like(scale, 1.0 - rate * self.train.weight_decay)
        first, second = (-torch.expm1((self.num_counted + 1.0) * math.log(beta)) for beta in (BETA1, BETA2))
        moments = self.exp_avg, self.exp_avg_sq
        adamw(self.master, gradient, *moments, self.weights, scale, decay, rate / first, second, found_inf)
        self.num_counted.copy_(num_counted)
        self.gradients.abandon()
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """Return masters, moments and the number of counted steps: live tensors, flat in the order of model.parameters()."""
        return {"master": self.master, "step": self.num_counted, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def master_weights(self) -> dict[str, Tensor]:
        """Return the float32 weights under the model's parameter names: live views."""
        return self._views(self.master)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state bit for bit, and set the model's parameters from it.

        Raises:
            ValueError: an entry is missing, or not of this model's size.
        """
        for name, own in self.state_dict().items():
            _check_shape(f"optimizer state {name}", own, state.get(name))
            own.copy_(state[name])
        self.weights.copy_(self.master)

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copy master weights by parameter name, and the entries of `state_dict` that `state` holds beside them.

        Raises:
            ValueError: a weight is missing or of another shape, and nothing was changed; or as `load_state_dict`.
        """
        own = self.master_weights()
        for name, weight in own.items():
            _check_shape(f"weight {name}", weight, weights.get(name))
        self.load_state_dict({**state, "master": torch.cat([weights[name].flatten() for name in own])})

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """Split the flat tensor into the shapes of the parameters."""
        pieces = flat.split_with_sizes([parameter.numel() for parameter in self._parameters.values()])
        named = zip(self._parameters.items(), pieces, strict=True)
        return {name: piece.view_as(parameter) for (name, parameter), piece in named}


def _check_shape(name: str, needed: Tensor, found: object) -> None:
    shape = tuple(found.shape) if isinstance(found, Tensor) else "none"
    if shape != tuple(needed.shape):
        raise ValueError(f"{name}: needed shape {tuple(needed.shape)}, found {shape}")
