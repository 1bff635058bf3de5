"""Name the likely cause of a first difference in what DFlash 2 adds: each known mistake is computed, and compared with what was
found.

B block size, H hidden, G groups, S slots of a block, K candidates of a slot, V vocabulary, r rank.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from launch.parity.plain_dflash2 import KERNEL, Convolution
from launch.parity.stages import Executed, get
from launch.parity.ties import ROUNDING

_SELECTOR = "candidate_selector."
_CONVOLUTION_MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {  # of weights [..., side, tap, channel or group]
    "tap order: a row takes the weight of the row before it, and that row takes its own": lambda weights: weights.flip(-2),
    "sides swapped: the convolution of the other side of the sublayer is executed": lambda weights: weights.flip(-3),
    "layout: [tap][side] is read, where the weights lie as [side][tap]": lambda weights: weights.transpose(-2, -3),
}


def explain_kind(found: Executed) -> str:
    """Name the side that leaves out convolutions and selector."""
    if "convolutions" in found.trace:
        return "kind or architectures: executed as DFlash 2, where the drafter learnt without convolutions and selector"
    return "kind or architectures: executed as plain DFlash, where the drafter learnt with convolutions and a selector"


def explain_count(needed: Executed, found: Executed) -> str:
    """Name both numbers of candidates; readings of another shape have no other cause."""
    counts = [executed.trace["candidates"][0].values.shape[1] for executed in (needed, found)]
    return f"selector_top_k: {counts[1]} candidates of a slot, the drafter learnt with {counts[0]}"


def explain_convolution(where: str, needed: Executed, found: Executed) -> str | None:
    """Return the mistake that makes one side's result out of the needed weights, None where none of those known does.

    The rows that are convolved agree on both sides, and are read where they were needed.
    """
    layer, part, block = where.split(", ", 2)
    sublayer, side = part.split()[0], 1 if part.endswith("side 1") else 0
    name, read = f"layers.{layer.removeprefix('layer ')}.{sublayer}_conv", f"{layer}, {sublayer}"
    rows = get(needed.trace, "hidden states", f"{read} {'output' if side else 'input'}, {block}")
    projected = get(needed.trace, "convolutions", f"{read} coefficients, {block}")
    base = needed.tensors[f"{name}.base_kernel"]
    right = Convolution(base, projected.view(len(rows), *KERNEL, -1)).apply(rows, side)
    result = get(found.trace, "convolutions", f"{read} side {side}, {block}")
    if _alike(result, right):  # so the needed result is not what its own weights give
        result, name = get(needed.trace, "convolutions", f"{read} side {side}, {block}"), f"on the needed side, {name}"
    if _alike(result, rows):
        return f"{name}: not executed, rows pass unchanged"
    for mistake, weights in _mistaken(base, projected):
        if _alike(result, weights.apply(rows, side)):
            return f"{name}: {mistake}"
    if _alike(result[1:], right[1:]) and not _alike(result, right):
        return f"{name}: block edge, the first row of a block reads a row before it, where it must read zeros"
    return None


def _mistaken(base: Tensor, projected: Tensor) -> Iterator[tuple[str, Convolution]]:
    """Yield every known mistake in base [2, 2, H], in projected rows [B, 2 * 2 * G], and in both."""
    dynamic = projected.view(len(projected), *KERNEL, -1)
    for text, change in _CONVOLUTION_MISTAKES.items():
        yield text, Convolution(change(base), change(dynamic))
        yield f"{text} (base_kernel only)", Convolution(change(base), dynamic)
        yield f"{text} (kernel_projection only)", Convolution(base, change(dynamic))
    groups_first = projected.view(len(projected), -1, *KERNEL).permute(0, 2, 3, 1)
    yield "layout: [group][side][tap] is read, where the weights lie as [side][tap][group]", Convolution(base, groups_first)


def explain_selection(where: str, needed: Executed, found: Executed) -> str | None:
    """Return the cause of other scores: other tokens before a slot, a narrower codebook, or a known mistake; None for none."""
    block = where.partition(", ")[2]
    for executed in (needed, found):
        if cause := _explain_predecessors(block, executed):
            return cause
    ranks = [executed.tensors[f"{_SELECTOR}predecessor_codebook"].shape[1] for executed in (needed, found)]
    if ranks[0] != ranks[1]:
        return f"selector_rank: the codebooks are {ranks[1]} wide, the drafter learnt with {ranks[0]}"
    scores = get(found.trace, "selection", f"scores, {block}")
    for mistake, mistaken in _mistaken_scores(block, needed):
        if _alike(scores[0], mistaken[0]):
            return f"selector: {mistake}"
    return None


def _explain_predecessors(block: str, executed: Executed) -> str | None:
    """Compare the tokens before slots with those that the same drafter chose: after the anchor they must be the same."""
    before, chosen = get(executed.trace, "selection", f"predecessors, {block}"), get(executed.trace, "accepted tokens", block)
    logits, labels = get(executed.trace, "logits", block), get(executed.trace, "loss mask", f"labels, {block}")
    tokens = get(executed.trace, "tokens", block)
    anchor, behind = tokens[0, :1], before[0, 1:]
    if torch.equal(before[0], torch.cat([anchor, chosen[0, :-1]])):
        return None
    known, text = labels[0, :-1] >= 0, "the tokens before slots are not those that the walk chose"
    if torch.equal(behind, logits.argmax(1)[:-1]):
        return f"predecessors: {text}, but the largest logits'"
    if bool(known.any()) and torch.equal(behind[known], labels[0, :-1][known]):
        return f"predecessors: {text}, but the labels'"
    if bool((before == anchor).all()):
        return f"predecessors: {text}, but the anchor everywhere"
    return f"predecessors: {text}"


def _mistaken_scores(block: str, needed: Executed) -> Iterator[tuple[str, Tensor]]:
    """Yield every known mistake, and the scores [S, K] that it gives after the tokens that were needed."""
    tokens = get(needed.trace, "candidates", f"tokens, {block}")
    before = get(needed.trace, "selection", f"predecessors, {block}")
    logits, hidden = get(needed.trace, "logits", block), get(needed.trace, "hidden states", f"final norm, {block}")
    values = logits.gather(1, tokens)
    yield "not executed, or its codebooks are empty: candidates score as their logits", values
    predecessors, successors = (needed.tensors[f"{_SELECTOR}{name}_codebook"] for name in ("predecessor", "successor"))
    projected = hidden[1:] @ needed.tensors[f"{_SELECTOR}hidden_projection.weight"].T
    swapped = values + torch.einsum("sr,sr,skr->sk", successors[before[0]], projected, predecessors[tokens])
    yield "transposed: predecessor_codebook and successor_codebook are swapped", swapped
    late = values + torch.einsum("sr,sr,skr->sk", predecessors[before[0]], projected.roll(1, 0), successors[tokens])
    yield "the hidden state of another slot is projected", late


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Return whether two results agree but for rounding; results of a mistake are far apart otherwise."""
    return bool((found - expected).abs().max() <= 4 * ROUNDING * expected.abs().max())
