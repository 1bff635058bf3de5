"""The experts of Llama 4 by grouped products: the numbers of transformers, which runs all experts for all tokens."""

from pathlib import Path

import torch

from services.target.experts import group_experts
from tests.builders.families import VOCABULARY, load_unchecked, make_family
from tests.builders.whole_models import make_config

TAPS = [0, 1, 2]


def test_only_chosen_experts_run_and_the_states_are_the_same(tmp_path: Path) -> None:
    make_family("llama4_text", num_experts_per_tok=2).save_pretrained(tmp_path)
    input_ids = torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
    whole, grouped = (load_unchecked(make_config(tmp_path, TAPS)) for _ in range(2))
    needed = whole.forward(input_ids)
    group_experts(grouped.decoder)
    for tap, found in zip(needed, grouped.forward(input_ids), strict=True):
        torch.testing.assert_close(found, tap, rtol=0, atol=1e-6 * float(tap.abs().max()))
    for name, parameter in grouped.decoder.named_parameters():
        if name.endswith("experts.down_proj"):
            parameter.mul_(2)
    assert not torch.allclose(grouped.forward(input_ids)[2], needed[2], atol=1e-3)
