"""Which code the linear-attention layers of a hybrid target run on."""

import importlib.util
import logging
import sys

import pytest
import torch
from transformers import AutoModel, LlamaConfig, PreTrainedModel, Qwen3_5TextConfig, Qwen3NextConfig

from common.errors import ModelError
from services.target.linear_attention import choose_kernels

LAYERS = ["linear_attention", "full_attention", "linear_attention"]
HYBRIDS = {
    "transformers.models.qwen3_5.modeling_qwen3_5": Qwen3_5TextConfig,
    "transformers.models.qwen3_next.modeling_qwen3_next": Qwen3NextConfig,
}
NO_FLA = pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="flash-linear-attention is installed")


def make_decoder(module: str) -> PreTrainedModel:
    config = HYBRIDS[module](
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=LAYERS,
        mlp_only_layers=[0, 1, 2],
    )
    torch.manual_seed(0)
    decoder: PreTrainedModel = AutoModel.from_config(config).train(False)  # type: ignore[no-untyped-call]
    return decoder


@pytest.mark.parametrize("module", HYBRIDS)
def test_every_linear_layer_calls_the_convolution_by_the_name_that_is_replaced(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, calls = make_decoder(module), []
    choose_kernels(decoder, torch.device("cpu"))
    convolution = sys.modules[module].causal_conv1d_fn

    def count(*arguments: torch.Tensor, **settings: object) -> torch.Tensor:
        calls.append([tuple(argument.shape) for argument in arguments if argument is not None])
        result: torch.Tensor = convolution(*arguments, **settings)
        return result

    monkeypatch.setattr(sys.modules[module], "causal_conv1d_fn", count)
    decoder(input_ids=torch.zeros(2, 5, dtype=torch.int64), use_cache=False)
    assert calls == [[(2, 32, 5), (32, 4)]] * LAYERS.count("linear_attention")


@NO_FLA
@pytest.mark.parametrize("module", HYBRIDS)
def test_a_hybrid_target_on_a_gpu_needs_the_kernels(module: str) -> None:
    decoder = make_decoder(module)
    with pytest.raises(ModelError, match=r"qwen3.*need flash-linear-attention on a GPU .*found: No module named 'fla'"):
        choose_kernels(decoder, torch.device("cuda"))


@pytest.mark.parametrize("module", HYBRIDS)
def test_on_a_cpu_torch_serves_and_the_log_says_so(module: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choose_kernels(make_decoder(module), torch.device("cpu"))
    assert "linear attention: delta rule of torch, convolution of torch" in caplog.text


def test_other_targets_need_nothing() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    choose_kernels(AutoModel.from_config(config), torch.device("cuda"))  # type: ignore[no-untyped-call]
