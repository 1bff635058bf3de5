"""How tokens are chosen from logits, and which drafts a target accepts.

Greedy decoding is the limit of temperature 0: all probability on the most likely token.
Shapes: R rows, n drafts of a row, V vocabulary.
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
    """Logits [..., V] to float64 probabilities [..., V]."""
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
    """Tokens int64 [...] in proportion to weights [..., V], by inversion: the same uniform numbers [...], the same tokens."""
    cumulated = weights.cumsum(dim=-1)
    return torch.searchsorted(cumulated, uniforms[..., None] * cumulated[..., -1:], right=True)[..., 0]


def accept(target: Tensor, draft: Tensor, drafts: Tensor, num_drafts: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Which drafts stay, and the token after them; together they are distributed as the target's own.

    A draft x stays with probability min(1, p(x) / q(x)) if all before it did. The token after them comes from the
    normalised max(p - q, 0) where a draft was refused, else from p (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1;
    Chen et al. 2023, arXiv 2302.01318).

    Args:
        target: p [R, n + 1, V], after the last known token and after each draft.
        draft: q [R, n, V], what each draft was drawn from.
        drafts: int64 [R, n].
        num_drafts: int64 [R], how many of its drafts count in each row.
        uniforms: [R, n + 1], independent, uniform on [0, 1).

    Returns:
        int64 [R] accepted drafts, at most `num_drafts`, and int64 [R] the tokens after them.
    """
    num_slots = drafts.shape[1]
    ratios = (target[:, :num_slots].gather(2, drafts[..., None]) / draft.gather(2, drafts[..., None]))[..., 0]
    counts = torch.arange(num_slots, device=drafts.device) < num_drafts[:, None]
    accepted = ((uniforms[:, :num_slots] < ratios) & counts).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(drafts), device=drafts.device)
    own = target[rows, accepted]
    refused = torch.cat([draft, torch.zeros_like(target[:, :1])], dim=1)[rows, accepted]
    residual = (own - refused * (accepted < num_drafts)[:, None]).clamp(min=0.0)
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0.0, residual, own)  # p = q but for rounding
    return accepted, draw(residual, uniforms[:, num_slots])
