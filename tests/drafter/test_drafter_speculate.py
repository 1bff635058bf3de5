"""Acceptance tests 4 and 6: inference equals training, and speculative decoding equals plain decoding.

Shapes: T context rows, N blocks, B block size, K taps, H hidden, V vocabulary.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import Target
from torch import Tensor
from transformers import PreTrainedModel

from common.config import Config
from services.drafter.attention import visibility_mask
from services.drafter.model import DraftModel
from services.drafter.speculate import BlockDrafter, greedy, speculate
from services.drafter.target_cache import TargetCache

MakeTarget = Callable[..., Target]
PROMPTS = [[5], [9, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [40, 41, 40, 41, 40]]


def training_forward(
    config: Config,
    target: PreTrainedModel,
    draft: DraftModel,
    taps: Tensor,
    tokens: Tensor,
    lengths: list[int],
    anchors: Tensor,
) -> Tensor:
    """All blocks of packed documents in one pass: [N * B, H]."""
    size = config.draft.block_size
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    masks = {
        kind: visibility_mask(
            anchors,
            documents[anchors],
            documents,
            torch.ones(len(anchors), dtype=torch.bool),
            size,
            config.draft.sliding_window if kind == "sliding_attention" else 0,
        )
        for kind in set(config.draft.layer_types)
    }
    block_tokens = torch.full((len(anchors), size), config.draft.mask_token_id)
    block_tokens[:, 0] = tokens[anchors]
    block_positions = positions[anchors][:, None] + torch.arange(size)
    context = draft.context_keys_values(draft.project_context(taps), positions)
    embeddings = target.get_input_embeddings()(block_tokens.flatten())
    hidden: Tensor = draft(embeddings, block_positions.flatten(), context, masks)
    return hidden


def overfit(config: Config, target: PreTrainedModel, documents: list[list[int]], num_steps: int) -> DraftModel:
    """A draft model that has learnt the documents by heart, every anchor of them."""
    draft, size = DraftModel(config), config.draft.block_size
    with torch.no_grad():
        taps = torch.cat([target_taps(config, target, document) for document in documents])
    tokens = torch.tensor([token for document in documents for token in document])
    lengths = [len(document) for document in documents]
    ends = torch.tensor(lengths).cumsum(0)
    anchors = torch.cat([torch.arange(end - length, end - size + 1) for end, length in zip(ends, lengths, strict=True)])
    labels = tokens[anchors[:, None] + torch.arange(1, size)]
    head = target.get_output_embeddings().weight.detach()
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    for _ in range(num_steps):
        hidden = training_forward(config, target, draft, taps, tokens, lengths, anchors)
        logits = hidden.unflatten(0, (-1, size))[:, 1:] @ head.T
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft


def target_taps(config: Config, target: PreTrainedModel, document: list[int]) -> Tensor:
    with TargetCache(target, config.draft.tap_layers) as cache:
        return cache.append(document)[1]


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_training_forward_equals_inference_step(make_target: MakeTarget, model_type: str) -> None:
    config, target = make_target(model_type)
    draft = DraftModel(config)
    lengths, anchors = [11, 20, 7], torch.tensor([3, 9, 11 + 1, 11 + 8, 11 + 15, 31 + 2, 31 + 5])
    tokens = torch.randint(0, 60, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    documents = [document.tolist() for document in tokens.split(lengths)]
    taps = [target_taps(config, target, document) for document in documents]
    trained = training_forward(config, target, draft, torch.cat(taps), tokens, lengths, anchors)
    trained = trained.unflatten(0, (-1, config.draft.block_size))

    starts = [0, 11, 31]
    for document, start in enumerate(starts):
        drafter, known = BlockDrafter(draft, config.draft, target), 0
        for block, anchor in enumerate(anchors.tolist()):
            if start <= anchor < start + lengths[document]:
                drafter.append(taps[document][known : anchor - start])
                known = anchor - start
                torch.testing.assert_close(drafter.hidden(int(tokens[anchor])), trained[block], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_untrained_draft_gives_the_greedy_tokens(make_target: MakeTarget, model_type: str) -> None:
    config, target = make_target(model_type)
    draft = DraftModel(config)
    for prompt in PROMPTS:
        for max_new_tokens in (1, 2, 3, 20):
            plain = greedy(target, prompt, max_new_tokens)
            fast = speculate(target, draft, config.draft, prompt, max_new_tokens)
            assert fast.tokens == plain.tokens
            assert len(plain.tokens) == plain.num_target_passes == max_new_tokens
            assert fast.num_target_passes == 1 + len(fast.accepted)
            assert max_new_tokens == 1 + sum(accepted + 1 for accepted in fast.accepted)


def test_greedy_equals_generate(make_target: MakeTarget) -> None:
    _, target = make_target("qwen3")
    for prompt in PROMPTS:
        generated = target.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        assert greedy(target, prompt, 20).tokens == generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("model_type", "shape"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
        (
            "qwen3_next",
            {
                "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
                "linear_num_value_heads": 2,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "num_experts": 0,
                "decoder_sparse_step": 100,
                "mlp_only_layers": [0, 1, 2, 3],
            },
        ),
    ],
    ids=["llama", "qwen3", "sliding target", "recurrent target"],
)
def test_trained_draft_gives_the_greedy_tokens_in_fewer_passes(
    make_target: MakeTarget, model_type: str, shape: dict[str, object]
) -> None:
    config, target = make_target(model_type, **shape)
    answers = [greedy(target, prompt, 32).tokens for prompt in PROMPTS]
    draft = overfit(config, target, [p + a for p, a in zip(PROMPTS[:3], answers[:3], strict=True)], num_steps=150)
    accepted = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        for max_new_tokens in (2, 13, 14, 15, 32):
            fast = speculate(target, draft, config.draft, prompt, max_new_tokens)
            assert fast.tokens == answer[:max_new_tokens]
            accepted += fast.accepted
        for stop_token in answer[3:6]:
            end = answer.index(stop_token) + 1
            fast = speculate(target, draft, config.draft, prompt, 32, stop_tokens=[stop_token])
            assert fast.tokens == greedy(target, prompt, 32, stop_tokens=[stop_token]).tokens == answer[:end]
            assert end == 1 + sum(accepted + 1 for accepted in fast.accepted)
    assert set(accepted) == {0, 1, 2, 3}  # every outcome of a block of four was really met
    assert sum(accepted) > 0.3 * len(accepted)


def test_empty_prompt_is_refused(make_target: MakeTarget) -> None:
    config, target = make_target("llama")
    with pytest.raises(ValueError, match="at least one prompt token"):
        greedy(target, [], 4)
    with pytest.raises(ValueError, match="at least one new token"):
        speculate(target, DraftModel(config), config.draft, [1], 0)
