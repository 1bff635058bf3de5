"""Attention with sinks on the kernels of SDPA: the numbers of transformers' eager code."""

from pathlib import Path

import pytest
import torch

from services.target.sinks import use_sinks
from tests.builders.families import VOCABULARY, load_unchecked, make_family
from tests.builders.whole_models import make_config

TAPS = [0, 1, 2]


@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash", "flint", "granite_swa"])
def test_sinks_weigh_as_in_eager_code(name: str, tmp_path: Path) -> None:
    make_family(name).save_pretrained(tmp_path)
    input_ids = torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
    eager, fast = (load_unchecked(make_config(tmp_path, TAPS)) for _ in range(2))
    use_sinks(fast.decoder)
    assert fast.decoder.config._attn_implementation == "attention_with_sinks"
    for needed, found in zip(eager.forward(input_ids), fast.forward(input_ids), strict=True):
        torch.testing.assert_close(found, needed, rtol=0, atol=3e-6 * float(needed.abs().max()))
    without = load_unchecked(make_config(tmp_path, TAPS))
    for parameter_name, parameter in without.decoder.named_parameters():
        if parameter_name.endswith(".sinks"):
            parameter.fill_(-1e4)  # takes no share
    assert not torch.allclose(without.forward(input_ids)[2], eager.forward(input_ids)[2], atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "deepseek_v4"])
def test_other_attention_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    make_family(name).save_pretrained(tmp_path)
    decoder = load_unchecked(make_config(tmp_path, TAPS)).decoder
    before = decoder.config._attn_implementation
    use_sinks(decoder)
    assert decoder.config._attn_implementation == before
