"""A drafter as an engine runs it, in plain torch: one document and one block at a time, behind keys and values that are
computed once per context row. Shares no code with the drafter that trains.

n rows of a document, a rows of context before a block, B block size, K taps, H hidden, V vocabulary, D head_dim.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from launch.parity.folder import Folder, LayerKind, Rope
from launch.parity.probe import Document, candidates
from launch.parity.stages import Reading, Trace, collect
from services.target.linear_attention import choose_kernels

FAR_ROW, FAR_STEP = 40000, 2503  # positions up to here are compared in steps, whatever the length of the documents
KeysValues = tuple[Tensor, Tensor]  # [a, heads, D] each
Angles = tuple[Tensor, Tensor]  # cosine and sine, [rows, D] each


class PlainTarget:
    """A whole target from its own files by transformers, in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        whole: Any = model
        choose_kernels(whole.get_decoder(), model.device)  # left to itself, transformers runs those of a GPU on the CPU
        self.model = model
        self.embed = whole.get_input_embeddings()
        self.head = whole.get_output_embeddings()
        self._outputs: dict[bytes, list[Tensor]] = {}  # of every layer, by the bytes of a document's ids

    def taps(self, document: Document, layer_ids: list[int]) -> Tensor:
        """The outputs of zero-based decoder layers: [n, K, H]; `hidden_states[id + 1]` of transformers."""
        key = document.input_ids.tobytes()
        if key not in self._outputs:
            self._outputs[key] = self._run(document)
        return torch.stack([self._outputs[key][layer] for layer in layer_ids], dim=1)

    def _run(self, document: Document) -> list[Tensor]:
        decoder: Any = self.model.get_decoder()  # type: ignore[no-untyped-call]
        last: list[Tensor] = []  # where the list of transformers holds what follows the final norm instead
        hook = decoder.layers[-1].register_forward_hook(
            lambda *call: last.append(call[-1][0] if isinstance(call[-1], tuple) else call[-1])
        )
        ids = torch.from_numpy(document.input_ids)[None].to(self.model.device)
        states = decoder(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        hook.remove()
        return [output[0].cpu() for output in (*states[1:-1], last[0])]

    def embeddings(self, tokens: Tensor) -> Tensor:
        """int64 [B] -> [B, H]."""
        embedded: Tensor = self.embed(tokens.to(self.model.device))
        return embedded.cpu()

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, H] -> [B, V]."""
        logits: Tensor = self.head(hidden.to(self.model.device))
        return logits.cpu()


@torch.inference_mode()
def run_plain(folder: Folder, target: PlainTarget, documents: list[Document]) -> Trace:
    """Compute every stage of every block of every document."""
    return collect(_readings(folder, target, documents))


def _readings(folder: Folder, target: PlainTarget, documents: list[Document]) -> Iterator[tuple[str, Reading]]:
    for number, document in enumerate(documents):
        taps = target.taps(document, folder.target_layer_ids)
        context = rms_norm(taps.flatten(1) @ folder.tensors["fc.weight"].T, folder.tensors["hidden_norm.weight"], folder.eps)
        angles = _angles(folder.rope, folder.head_dim, torch.arange(len(context)))
        cached = [_keys_values(folder, index, context, angles) for index in range(len(folder.kinds))]
        yield from _document_readings(folder, document, taps, context, cached, f"document {number}")
        hidden: dict[str, Tensor] = {}
        for anchor in document.anchors:
            where = f"document {number}, block at row {anchor}"
            for stage, reading in _read_block(folder, target, document, anchor, cached):
                hidden[where] = reading.values  # of the last one: behind the final norm
                yield stage, reading._replace(where=named(reading.where, where))
        yield from _head_readings(folder, target, hidden)
    yield from far_readings(folder)


def _document_readings(
    folder: Folder, document: Document, taps: Tensor, context: Tensor, cached: list[KeysValues], where: str
) -> Iterator[tuple[str, Reading]]:
    yield "loss mask", Reading(f"anchors, {where}", torch.from_numpy(candidates(document.loss_mask))[None])
    for tap in range(taps.shape[1]):
        yield "taps", Reading(f"tap {tap}, {where}", taps[:, tap])
    yield "projection", Reading(where, context)
    yield from angle_readings(folder.rope, folder.head_dim, torch.arange(len(context)), where)
    for index, (key, value) in enumerate(cached):
        yield "keys and values", Reading(f"keys of layer {index}, {where}", key.flatten(1))
        yield "keys and values", Reading(f"values of layer {index}, {where}", value.flatten(1))


def _read_block(
    folder: Folder, target: PlainTarget, document: Document, anchor: int, cached: list[KeysValues]
) -> Iterator[tuple[str, Reading]]:
    """The stages of one block; the anchor's own row of the context is not seen, only those before it."""
    size = folder.block_size
    tokens = torch.tensor([int(document.input_ids[anchor])] + [folder.mask_token_id] * (size - 1))
    yield "tokens", Reading("", tokens[None])
    yield "loss mask", Reading("labels", _labels(document, anchor, size)[None])
    positions = torch.arange(anchor, anchor + size)
    angles = _angles(folder.rope, folder.head_dim, positions)
    yield from name_angles(*angles, positions, "")
    rows = _embed(folder, target, tokens)
    yield "embeddings", Reading("", rows)
    for index, kind in enumerate(folder.kinds):
        mask = visible(kind, anchor, size)
        yield "masks", Reading(f"layer {index}", with_others(mask, torch.zeros(size, dtype=torch.bool)))
        context = cached[index][0][:anchor], cached[index][1][:anchor]
        rows = _layer(folder, index, rows, angles, context, mask)
        yield "hidden states", Reading(f"layer {index}", rows)
    yield "hidden states", Reading("final norm", rms_norm(rows, folder.tensors["norm.weight"], folder.eps))


def _head_readings(folder: Folder, target: PlainTarget, hidden: dict[str, Tensor]) -> Iterator[tuple[str, Reading]]:
    """Logits and drafts of a document's blocks, in one product: the head is large, and a block has few rows."""
    rows = torch.cat([block[1:] for block in hidden.values()])
    for where, logits in zip(hidden, torch.split(_head(folder, target, rows), folder.block_size - 1), strict=True):
        yield "logits", Reading(where, logits)
        yield "accepted tokens", Reading(where, logits.argmax(1)[None])


def far_readings(folder: Folder) -> Iterator[tuple[str, Reading]]:
    """What shows only far from the start: angles there, and masks where the window has left the start behind."""
    positions = torch.arange(0, FAR_ROW, FAR_STEP)
    yield from angle_readings(folder.rope, folder.head_dim, positions, "far positions")
    for index, kind in enumerate(folder.kinds):
        mask = visible(kind, FAR_ROW, folder.block_size)
        yield "masks", Reading(f"layer {index}, block at row {FAR_ROW} of a long document", mask)
    other = folder.other_rope or folder.rope
    yield from angle_readings(other, folder.head_dim, positions, "far positions by the older keys")


def named(what: str, where: str) -> str:
    """Joined by a comma where both say something."""
    return ", ".join(filter(None, (what, where)))


def visible(kind: LayerKind, anchor: int, block_size: int) -> Tensor:
    """What each row of a block may look at: bool [B, a + B], the context and then the block itself."""
    rows, keys = torch.arange(anchor, anchor + block_size)[:, None], torch.arange(anchor + block_size)[None, :]
    seen = torch.ones(block_size, anchor + block_size, dtype=torch.bool)
    if kind.causal:
        seen &= keys <= rows
    if kind.window:
        seen &= (rows - keys).abs() < kind.window
    return seen


def with_others(mask: Tensor, others: Tensor) -> Tensor:
    """The mask with a last column: whether a row looks at anything that is not of its document or block."""
    return torch.cat([mask, others[:, None]], dim=1)


def angle_readings(rope: Rope, head_dim: int, positions: Tensor, where: str) -> Iterator[tuple[str, Reading]]:
    """Cosine and sine of every channel of a head, [positions, D]; channels that are not rotated are 1 and 0."""
    yield from name_angles(*_angles(rope, head_dim, positions), positions, where)


def name_angles(cosine: Tensor, sine: Tensor, positions: Tensor, where: str) -> Iterator[tuple[str, Reading]]:
    """Both as readings; an angle is a product with the position, so its rounding grows with it."""
    scale = 1.0 + positions.float() / 256
    for name, values in (("cosine", cosine), ("sine", sine)):
        yield "rotary angles", Reading(named(name, where), values, scale)


def _angles(rope: Rope, head_dim: int, positions: Tensor) -> Angles:
    angles = positions[:, None].float() * rope.inv_freq[None, :]
    rest = head_dim - 2 * len(rope.inv_freq)
    pad = torch.zeros(len(positions), rest)
    turned = torch.cat([angles, angles, pad], dim=1)
    scale = torch.cat([torch.full((head_dim - rest,), rope.scaling), torch.ones(rest)])
    return turned.cos() * scale, turned.sin() * scale


def _rotate(folder: Folder, heads: Tensor, angles: Angles) -> Tensor:
    """[rows, heads, D], pairing channel i with channel i + D' / 2 of the D' that are rotated."""
    cosine, sine = angles
    half = len(folder.rope.inv_freq)
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    partners = torch.cat([-second, first, rest], dim=-1)
    return heads * cosine[:, None] + partners * sine[:, None]


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension."""
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight


def _split(folder: Folder, rows: Tensor) -> Tensor:
    """[rows, heads * D] -> [rows, heads, D]."""
    return rows.view(len(rows), -1, folder.head_dim)


def _keys_values(folder: Folder, index: int, rows: Tensor, angles: Angles) -> KeysValues:
    key, value = (_split(folder, rows @ folder.tensors[f"layers.{index}.self_attn.{part}_proj.weight"].T) for part in "kv")
    key = rms_norm(key, folder.tensors[f"layers.{index}.self_attn.k_norm.weight"], folder.eps)
    return _rotate(folder, key, angles), value


def _layer(folder: Folder, index: int, rows: Tensor, angles: Angles, context: KeysValues, mask: Tensor) -> Tensor:
    """Block rows [B, H] through one layer."""
    prefix = f"layers.{index}."
    weight = {name.removeprefix(prefix): tensor for name, tensor in folder.tensors.items() if name.startswith(prefix)}
    normed = rms_norm(rows, weight["input_layernorm.weight"], folder.eps)
    query = _split(folder, normed @ weight["self_attn.q_proj.weight"].T)
    query = _rotate(folder, rms_norm(query, weight["self_attn.q_norm.weight"], folder.eps), angles)
    own = _keys_values(folder, index, normed, angles)
    group = folder.num_heads // folder.num_key_value_heads
    key, value = (torch.cat(both).repeat_interleave(group, dim=1) for both in zip(context, own, strict=True))
    scores = torch.einsum("qhd,khd->hqk", query, key) * folder.head_dim**-0.5
    attention = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", attention, value).flatten(1)
    rows = rows + attended @ weight["self_attn.o_proj.weight"].T
    normed = rms_norm(rows, weight["post_attention_layernorm.weight"], folder.eps)
    gate: Tensor = ACT2FN[folder.activation](normed @ weight["mlp.gate_proj.weight"].T)
    return rows + (gate * (normed @ weight["mlp.up_proj.weight"].T)) @ weight["mlp.down_proj.weight"].T


def _embed(folder: Folder, target: PlainTarget, tokens: Tensor) -> Tensor:
    """As `_head`."""
    own = folder.tensors.get("embed_tokens.weight")
    return target.embeddings(tokens) if own is None else own[tokens]


def _head(folder: Folder, target: PlainTarget, hidden: Tensor) -> Tensor:
    """The target's head, or the folder's own where it brings one: an engine loads what it finds."""
    own = folder.tensors.get("lm_head.weight")
    return target.logits(hidden) if own is None else hidden @ own.T


def _labels(document: Document, anchor: int, block_size: int) -> Tensor:
    """The true token of every slot behind the anchor, up to the first that is not supervised; -1 from there on."""
    labels = torch.full((block_size - 1,), -1)
    for slot in range(block_size - 1):
        row = anchor + 1 + slot
        if row >= len(document.input_ids) or not document.loss_mask[row]:
            break
        labels[slot] = int(document.input_ids[row])
    return labels
