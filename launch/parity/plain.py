"""Execute a drafter as an engine does, in plain torch: one document and one block at a time, behind keys and values that are
computed once per context row. Shares no code with the drafter that trains.

n rows of a document, a rows of context before a block, B block size, K taps, H hidden, V vocabulary, D head_dim.
"""

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from launch.parity import stages
from launch.parity.folder import Folder, LayerKind, Rope
from launch.parity.plain_dflash2 import Convolution, select
from launch.parity.probe import Document, candidates
from launch.parity.stages import Angles, Reading, Readings, Sublayer, Trace
from services.target.architecture import find_layers, one_stream
from services.target.linear_attention import choose_kernels

KeysValues = tuple[Tensor, Tensor]  # [a, heads, D] each


class PlainTarget:
    """A whole target from its own files by transformers, in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        whole: Any = model
        choose_kernels(whole.get_decoder(), model.device)  # by default transformers runs the kernels of a GPU on the CPU
        self._device, self._decoder = model.device, whole.get_decoder()
        self._embed, self._head = whole.get_input_embeddings(), whole.get_output_embeddings()

    def taps(self, document: Document, layer_ids: list[int]) -> Tensor:
        """Return the outputs of zero-based decoder layers: [n, K, H]; `hidden_states[id + 1]` of transformers."""
        last: list[Tensor] = []  # in the list of transformers the final norm comes instead
        hook = (
            find_layers(self._decoder)
            .layers[-1]
            .register_forward_hook(lambda *call: last.append(call[-1][0] if isinstance(call[-1], tuple) else call[-1]))
        )
        ids = torch.from_numpy(document.input_ids)[None].to(self._device)
        states = self._decoder(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        hook.remove()
        outputs = [*states[1:-1], last[0]]
        return torch.stack([one_stream(outputs[layer])[0] for layer in layer_ids], dim=1).cpu()

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Return the rows [B, H] of the embedding for int64 [B], as engines hand them on: without a scale of the target."""
        embedded: Tensor = self._embed.weight[tokens.to(self._device)]
        return embedded.cpu()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the products [B, V] of hidden states [B, H] with the head, as engines make them: without a bias."""
        logits: Tensor = hidden.to(self._device) @ self._head.weight.T
        return logits.cpu()


@torch.inference_mode()
def run_plain(folder: Folder, target: PlainTarget, documents: list[Document]) -> Trace:
    """Compute every stage of every block of every document."""
    return stages.collect(_readings(folder, target, documents))


def _readings(folder: Folder, target: PlainTarget, documents: list[Document]) -> Readings:
    for number, document in enumerate(documents):
        taps = target.taps(document, folder.settings["tap_layers"])
        context = _norm(folder, taps.flatten(1) @ folder.tensors["fc.weight"].T, "hidden_norm")
        angles = _angles(folder, folder.rope, torch.arange(len(context)))
        cached = [_keys_values(folder, index, context, angles) for index in range(len(folder.kinds))]
        yield from stages.document_readings(number, candidates(document.loss_mask), taps, context, angles, cached)
        hidden: list[Tensor] = []
        for anchor in document.anchors:
            block = yield from _read_block(folder, target, document, anchor, cached, stages.block_name(number, anchor))
            hidden.append(block[1:])
        yield from _read_heads(folder, target, document, number, hidden)
    angles, older = (_angles(folder, rope, stages.FAR_POSITIONS) for rope in (folder.rope, folder.older_rope or folder.rope))
    yield from stages.far_readings(
        angles, older, [visible(kind, stages.FAR_ROW, folder.settings["block_size"]) for kind in folder.kinds]
    )


def _read_block(
    folder: Folder, target: PlainTarget, document: Document, anchor: int, cached: list[KeysValues], where: str
) -> Generator[tuple[str, Reading], None, Tensor]:
    """Read one block and return its output [B, H]; it sees the context before the anchor's own row."""
    settings, size = folder.settings, folder.settings["block_size"]
    tokens = torch.tensor([int(document.input_ids[anchor])] + [settings["mask_token_id"]] * (size - 1))
    angles, rows = _angles(folder, folder.rope, torch.arange(anchor, anchor + size)), _embed(folder, target, tokens)
    yield from stages.start_readings(where, tokens, _labels(document, anchor, size), rows, angles, anchor)
    layers = []
    for index, kind in enumerate(folder.kinds):
        mask = visible(kind, anchor, size)
        context = cached[index][0][:anchor], cached[index][1][:anchor]
        sublayers, rows = _layer(folder, index, rows, angles, context, mask)
        shown = sublayers if settings["kind"] == "dflash2" else []
        layers.append((mask, torch.zeros(size, dtype=torch.bool), shown, rows))
    output = _norm(folder, rows, "norm")
    yield from stages.layer_readings(where, layers, output)
    return output


def _read_heads(folder: Folder, target: PlainTarget, document: Document, number: int, hidden: list[Tensor]) -> Readings:
    """Read the ends of a document's blocks: one product, because the head is large, and a block has few rows [B - 1, H]."""
    logits = torch.split(_scale(folder, _head(folder, target, torch.cat(hidden))), folder.settings["block_size"] - 1)
    for anchor, rows, of_block in zip(document.anchors, hidden, logits, strict=True):
        where, drafts = stages.block_name(number, anchor), of_block.argmax(1)
        if folder.settings["kind"] == "dflash2":
            selection = select(folder, rows, of_block, int(document.input_ids[anchor]))
            yield from stages.selection_readings(where, selection)
            drafts = selection.drafts
        yield from stages.head_readings(where, of_block, drafts)


def visible(kind: LayerKind, anchor: int, block_size: int) -> Tensor:
    """Return the rows that each row of a block sees: bool [B, a + B], the context and then the block itself."""
    rows, keys = torch.arange(anchor, anchor + block_size)[:, None], torch.arange(anchor + block_size)[None, :]
    seen = torch.ones(block_size, anchor + block_size, dtype=torch.bool)
    if kind.causal:
        seen &= keys <= rows
    if kind.window:
        seen &= (rows - keys).abs() < kind.window
    return seen


def _angles(folder: Folder, rope: Rope, positions: Tensor) -> Angles:
    """Return cosine and sine of every channel of a head; channels that are not rotated have 1 and 0."""
    angles = positions[:, None].float() * rope.inv_freq[None, :]
    rest = folder.settings["head_dim"] - 2 * len(rope.inv_freq)
    turned = torch.cat([angles, angles, torch.zeros(len(positions), rest)], dim=1)
    scale = torch.cat([torch.full((2 * len(rope.inv_freq),), rope.scaling), torch.ones(rest)])
    return turned.cos() * scale, turned.sin() * scale


def _rotate(folder: Folder, heads: Tensor, angles: Angles) -> Tensor:
    """Rotate [rows, heads, D], pairing channel i with channel i + D' / 2 of the D' that are rotated."""
    cosine, sine = angles
    half = len(folder.rope.inv_freq)
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    partners = torch.cat([-second, first, rest], dim=-1)
    return heads * cosine[:, None] + partners * sine[:, None]


def _norm(folder: Folder, rows: Tensor, name: str) -> Tensor:
    eps: float = folder.settings["rms_norm_eps"]
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * folder.tensors[f"{name}.weight"]


def _project(folder: Folder, rows: Tensor, name: str) -> Tensor:
    return rows @ folder.tensors[f"{name}.weight"].T


def _heads(folder: Folder, rows: Tensor, name: str) -> Tensor:
    """Project to [rows, heads, D]."""
    return _project(folder, rows, name).view(len(rows), -1, folder.settings["head_dim"])


def _keys_values(folder: Folder, index: int, rows: Tensor, angles: Angles) -> KeysValues:
    prefix = f"layers.{index}.self_attn."
    key = _norm(folder, _heads(folder, rows, f"{prefix}k_proj"), f"{prefix}k_norm")
    return _rotate(folder, key, angles), _heads(folder, rows, f"{prefix}v_proj")


def _layer(
    folder: Folder, index: int, rows: Tensor, angles: Angles, context: KeysValues, mask: Tensor
) -> tuple[list[Sublayer], Tensor]:
    """Run block rows [B, H] through one layer; return its sublayers, too."""
    prefix = f"layers.{index}."
    entering = _norm(folder, rows, f"{prefix}input_layernorm")
    attention = _sublayer(
        folder, f"{prefix}attention_conv", entering, lambda mixed: _attend(folder, index, mixed, angles, context, mask)
    )
    rows = rows + attention.side_1
    entering = _norm(folder, rows, f"{prefix}post_attention_layernorm")
    mlp = _sublayer(folder, f"{prefix}mlp_conv", entering, lambda mixed: _feed(folder, f"{prefix}mlp.", mixed))
    return [attention, mlp], rows + mlp.side_1


def _sublayer(folder: Folder, convolution: str, entering: Tensor, compute: Callable[[Tensor], Tensor]) -> Sublayer:
    """Compute one sublayer, in DFlash 2 between its convolutions."""
    if folder.settings["kind"] != "dflash2":
        output = compute(entering)
        return Sublayer(entering, entering[:, :0], entering, output, output)
    kernels = Convolution.make(folder, convolution, entering)
    before = kernels.apply(entering, side=0)
    output = compute(before)
    return Sublayer(entering, kernels.dynamic.flatten(1), before, output, kernels.apply(output, side=1))


def _attend(folder: Folder, index: int, rows: Tensor, angles: Angles, context: KeysValues, mask: Tensor) -> Tensor:
    """Return the output of attention [B, H], whose keys are the context and the block rows [B, H] themselves."""
    prefix, settings = f"layers.{index}.self_attn.", folder.settings
    query = _norm(folder, _heads(folder, rows, f"{prefix}q_proj"), f"{prefix}q_norm")
    query, own = _rotate(folder, query, angles), _keys_values(folder, index, rows, angles)
    group = settings["num_attention_heads"] // settings["num_key_value_heads"]
    key, value = (torch.cat(both).repeat_interleave(group, dim=1) for both in zip(context, own, strict=True))
    scores = torch.einsum("qhd,khd->hqk", query, key) * settings["head_dim"] ** -0.5
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value).flatten(1)
    return _project(folder, attended, f"{prefix}o_proj")


def _feed(folder: Folder, prefix: str, rows: Tensor) -> Tensor:
    gate: Tensor = ACT2FN[folder.activation](_project(folder, rows, f"{prefix}gate_proj"))
    return _project(folder, gate * _project(folder, rows, f"{prefix}up_proj"), f"{prefix}down_proj")


def _embed(folder: Folder, target: PlainTarget, tokens: Tensor) -> Tensor:
    """Embed with the target's weights, or with the folder's own: an engine loads whatever it finds."""
    own = folder.tensors.get("embed_tokens.weight")
    embeddings = target.embeddings(tokens) if own is None else own[tokens]
    scale: float = folder.settings.get("input_embedding_scale", 1.0)
    return embeddings * scale


def _head(folder: Folder, target: PlainTarget, hidden: Tensor) -> Tensor:
    own = folder.tensors.get("lm_head.weight")
    return target.logits(hidden) if own is None else hidden @ own.T


def _scale(folder: Folder, logits: Tensor) -> Tensor:
    """Multiply and then bend logits, as a drafter of DFlash 2 may ask for; those of training are as they are."""
    logits, cap = logits * folder.settings.get("output_multiplier", 1.0), folder.settings.get("final_logit_softcapping", 0.0)
    return cap * torch.tanh(logits / cap) if cap else logits


def _labels(document: Document, anchor: int, block_size: int) -> Tensor:
    """Return the true token of every slot behind the anchor, up to the first that is not supervised; -1 from there on."""
    labels = torch.full((block_size - 1,), -1)
    for slot in range(block_size - 1):
        row = anchor + 1 + slot
        if row >= len(document.input_ids) or not document.loss_mask[row]:
            break
        labels[slot] = int(document.input_ids[row])
    return labels
