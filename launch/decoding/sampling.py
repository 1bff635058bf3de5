"""Choose tokens from logits, and the drafts that a target accepts.

Greedy decoding is the limit of temperature 0: all probability on the most likely token.
Shapes: n drafts of a round, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Sampling(NamedTuple):
    """Temperature 0 is greedy; top_p 1 leaves no token out."""

    temperature: float = 0.0
    top_p: float = 1.0


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Turn logits [..., V] into float64 probabilities [..., V]."""
    if sampling.temperature == 0.0:
        likeliest = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros(logits.shape, dtype=torch.float64, device=logits.device).scatter_(-1, likeliest, 1.0)
    chances = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    if sampling.top_p < 1.0:
        ordered, tokens = chances.sort(dim=-1, descending=True, stable=True)
        likelier = ordered.cumsum(dim=-1) - ordered  # the weight of all tokens before each
        kept = ordered.masked_fill(likelier >= sampling.top_p, 0.0)
        chances = torch.zeros_like(chances).scatter_(-1, tokens, kept / kept.sum(dim=-1, keepdim=True))
    return chances


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw int64 [...] in proportion to weights [..., V] by inversion, so equal uniform numbers [...] give equal tokens."""
    cumulated = weights.cumsum(dim=-1)
    return torch.searchsorted(cumulated, uniforms[..., None] * cumulated[..., -1:], right=True)[..., 0]


def accept(target: Tensor, draft: Tensor, drafts: Tensor, uniforms: Tensor) -> tuple[int, int]:
    """Return how many drafts stay, and the token after them; together they are distributed as the target's own.

    A draft x stays with probability min(1, p(x) / q(x)) if all before it did. The token after them comes from the
    normalised max(p - q, 0) where a draft was refused, else from p (Leviathan et al., arXiv 2211.17192, algorithm 1;
    Chen et al., arXiv 2302.01318).

    Args:
        target: p [n + 1, V], after the last known token and after each draft.
        draft: q [n, V], what each draft was drawn from.
        drafts: int64 [n].
        uniforms: [n + 1], independent, uniform on [0, 1).
    """
    num_drafts = len(drafts)
    ratios = (target[:num_drafts].gather(1, drafts[:, None]) / draft.gather(1, drafts[:, None]))[:, 0]
    accepted = int((uniforms[:num_drafts] < ratios).long().cumprod(dim=0).sum())
    own = target[accepted]
    if accepted < num_drafts:
        residual = (own - draft[accepted]).clamp(min=0.0)
        own = residual if residual.sum() > 0.0 else own  # p = q but for rounding
    return accepted, int(draw(own, uniforms[num_drafts]))
