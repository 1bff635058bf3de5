"""The candidate selector of DFlash 2: it chooses among the likeliest tokens of a slot by the token before them.

Shapes: R rows (slots of blocks), N blocks, S = B - 1 slots of a block, H hidden, V vocabulary, K candidates of a slot,
r rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import Config
from services.drafter.kernels.fused import fused

_SEGMENT = 128  # logits: the length of a run with one maximum


class Candidates(NamedTuple):
    """The K tokens of the largest logits, in the order of their ids: of equal scores the first wins, as in an argmax over V."""

    tokens: Tensor  # int64 [..., K]
    logits: Tensor  # float32 [..., K]


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), or the logits for a cap of 0."""
    return cap * torch.tanh(logits / cap) if cap else logits


def top_candidates(logits: Tensor, count: int, softcap: float = 0.0) -> Candidates:
    """Return the `count` largest of the logits [R, V], capped by `soft_cap` in float32.

    The largest logits lie in the segments with the largest maxima. So a long row is read once, for the maxima; a selection
    among all of its logits would read it ten times.
    """
    num_rows, num_segments = logits.shape[0], logits.shape[1] // _SEGMENT
    if num_segments > count:
        segments = segment_maxima(logits).topk(count, dim=1, sorted=False).indices
        columns = torch.arange(_SEGMENT, device=logits.device)
        inside = (segments[..., None] * _SEGMENT + columns).flatten(1)
        tail = torch.arange(num_segments * _SEGMENT, logits.shape[1], device=logits.device).expand(num_rows, -1)
        tokens = torch.cat([inside, tail], dim=1)
        tokens = tokens.gather(1, logits.gather(1, tokens).topk(count, dim=1, sorted=False).indices)
    else:
        tokens = logits.topk(count, dim=1, sorted=False).indices
    tokens = tokens.sort(1).values
    return Candidates(tokens, soft_cap(logits.gather(1, tokens).float(), softcap))


@fused
def segment_maxima(logits: Tensor) -> Tensor:
    """Return the largest logit of each whole segment of the rows [R, V]: [R, V // _SEGMENT]."""
    num_segments = logits.shape[1] // _SEGMENT
    return logits[:, : num_segments * _SEGMENT].view(logits.shape[0], num_segments, _SEGMENT).amax(2)


@fused
def add_scores(logits: Tensor, state: Tensor, successors: Tensor) -> Tensor:
    """Return logits [R, K] plus the products of states [R, r] with successors [R, K, r]: float32 [R, K]."""
    return logits + (state.float()[:, None] * successors.float()).sum(2)


Choose = Callable[[int, Tensor], Tensor]  # slot index and scores [N, K] -> the chosen columns, int64 [N]


def likeliest(_slot: int, scores: Tensor) -> Tensor:
    return scores.argmax(1)


class CandidateSelector(nn.Module):
    """Scores candidate c of a slot: logit[c] + <predecessor[token before] * project(hidden), successor[c]>."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        vocabulary, rank = config.shape.vocab_size, config.draft.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(config.shape.hidden_size, rank, bias=False)

    @torch.no_grad()
    def initialise(self) -> None:
        """Let all candidates score as their logits; the first step gives the successors a gradient, they the others."""
        self.successor_codebook.zero_()

    def forward(self, hidden: Tensor, candidates: Candidates, previous: Tensor) -> Tensor:
        """Return the scores of candidates [R, K] of rows [R, H], after the tokens `previous` int64 [R]: float32 [R, K]."""
        projected = self.hidden_projection(hidden.to(self.hidden_projection.weight.dtype))
        state = F.embedding(previous, self.predecessor_codebook) * projected
        return add_scores(candidates.logits, state, F.embedding(candidates.tokens, self.successor_codebook))

    def select(self, hidden: Tensor, candidates: Candidates, anchors: Tensor, choose: Choose = likeliest) -> Tensor:
        """Choose slot after slot, each after the token chosen before it: int64 [N, S].

        Args:
            hidden: [N, S, H], after the final norm.
            candidates: [N, S, K].
            anchors: int64 [N], the tokens before slot 1.
            choose: see `Choose`; called once per slot.
        """
        chosen = [anchors]
        for slot in range(hidden.shape[1]):
            of_slot = Candidates(candidates.tokens[:, slot], candidates.logits[:, slot])
            column = choose(slot, self(hidden[:, slot], of_slot, chosen[-1]))
            chosen.append(of_slot.tokens.gather(1, column[:, None])[:, 0])
        return torch.stack(chosen[1:], dim=1)


def selector_loss(scores: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of the scores [R, K] of tokens [R, K]: float32 [R], 0 where the label is no candidate."""
    is_label = tokens == labels[:, None]
    losses = scores.logsumexp(1) - torch.where(is_label, scores, 0.0).sum(1)
    return torch.where(is_label.any(1), losses, 0.0)
