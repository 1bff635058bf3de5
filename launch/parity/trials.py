"""What would be accepted if the folder said something else: finds by its effect what no file can tell.

A drafter executes under wrong layer ids or a wrong window as well as under right ones, it only drafts worse. So every setting
that is known to go wrong is changed, one at a time, and the blocks of the same text are drafted again.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.target_shape import TargetShape, default_tap_layers
from launch.parity.folder import Folder, LayerKind, default_rope
from launch.parity.plain import PlainTarget, read_plain
from launch.parity.probe import Document, with_anchors
from launch.parity.stages import collect, find

NUM_ANCHORS = 32  # of each document: acceptance needs more blocks than arithmetic
CERTAIN = 3.0  # standard errors


class Trial(NamedTuple):
    """One change and its effect.

    Attributes:
        change: in words; "as it is" first.
        accepted: drafts accepted per block.
        gain: over the folder as it is, mean over the same blocks.
        error: standard error of the gain.
    """

    change: str
    accepted: float
    gain: float
    error: float

    @property
    def is_better(self) -> bool:
        """The gain is no chance."""
        return self.gain > CERTAIN * self.error and self.gain > 0


def run_trials(folder: Folder, target: PlainTarget, shape: TargetShape, documents: list[Document]) -> list[Trial]:
    """The folder as it is, then every change that applies to it.

    Args:
        folder: the drafter.
        target: the whole target.
        shape: of the target.
        documents: text of the target's own; other text measures little.
    """
    documents = [with_anchors(document, NUM_ANCHORS) for document in documents]
    before = _accepted(folder, target, documents)
    trials = [Trial("as it is", float(before.mean()), 0.0, 0.0)]
    for change, changed in changes(folder, shape):
        gain = _accepted(changed, target, documents) - before
        error = float(gain.std(ddof=1) / np.sqrt(len(gain))) if len(gain) > 1 else 0.0
        trials.append(Trial(change, float((before + gain).mean()), float(gain.mean()), error))
    return trials


def changes(folder: Folder, shape: TargetShape) -> Iterator[tuple[str, Folder]]:
    """Every way to read the folder that differs from what it says."""
    yield from _other_taps(folder, shape)
    rope = default_rope(shape.rope_theta, folder.head_dim)
    if len(rope.inv_freq) != len(folder.rope.inv_freq) or not torch.equal(rope.inv_freq, folder.rope.inv_freq):
        yield f"all channels rotated by the target's theta {shape.rope_theta:g}", folder._replace(rope=rope)
    if folder.other_rope and not torch.equal(folder.other_rope.inv_freq, folder.rope.inv_freq):
        yield "rotated by the older keys", folder._replace(rope=folder.other_rope)
    kinds = folder.kinds
    if any(kind.window for kind in kinds):
        yield "no window", folder._replace(kinds=[kind._replace(window=0) for kind in kinds])
    elif window := folder.content.get("sliding_window"):
        named = folder.content.get("layer_types") or []
        if "sliding_attention" in named:
            windowed = [
                LayerKind(window if name == "sliding_attention" else 0, k.causal) for name, k in zip(named, kinds, strict=True)
            ]
            yield f"the window of {window} in force", folder._replace(kinds=windowed)
    for causal in (False, True):
        if any(kind.causal != causal for kind in kinds):
            words = "causal blocks in all layers" if causal else "blocks that look both ways in all layers"
            yield words, folder._replace(kinds=[kind._replace(causal=causal) for kind in kinds])


def _other_taps(folder: Folder, shape: TargetShape) -> Iterator[tuple[str, Folder]]:
    ids, last = folder.target_layer_ids, shape.num_hidden_layers - 1
    others = [[layer + shift for layer in ids] for shift in (-1, 1)] + [default_tap_layers(last + 1, len(ids))]
    seen = [ids]
    for other in others:
        if other not in seen and other == sorted(set(other)) and other[0] >= 0 and other[-1] <= last:
            seen.append(other)
            yield f"taps of layers {other}", folder._replace(target_layer_ids=other)


@torch.inference_mode()
def _accepted(folder: Folder, target: PlainTarget, documents: list[Document]) -> NDArray[np.int64]:
    """Drafts accepted in every block."""
    wanted = ("accepted tokens", "loss mask")
    trace = collect((stage, reading) for stage, reading in read_plain(folder, target, documents) if stage in wanted)
    counts = []
    for reading in trace["accepted tokens"]:
        labels = find(trace, "loss mask", f"labels, {reading.where}")
        assert labels is not None
        counts.append(int((reading.values == labels).long().cumprod(1).sum()))
    return np.array(counts)
