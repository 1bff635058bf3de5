"""Linear layers in FP8: the numbers of the checkpoint, activations rounded by row, and what cannot run so."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from common.config import Config, TargetsConfig, load
from common.errors import ConfigError
from services.target.flops import ForwardFlops
from services.target.fp8_linear import Fp8Linear, quantize, quantize_linears, use_stored_numbers
from services.target.model import TargetModel
from tests.builders.quantized_folders import LAYOUTS, quantize_folder
from tests.builders.whole_models import CPU, VOCABULARY, make_config, make_folder

CHANNELS = ["compressed per channel", "compressed per tensor", "modelopt", "fp8 per tensor"]


def make_model(folder: Path, layout: str, device: torch.device = CPU) -> tuple[Config, TargetModel]:
    """A target in bfloat16, dequantized."""
    make_folder("qwen3", folder / "plain")
    quantize_folder(folder / "plain", folder / "quantized", LAYOUTS[layout])
    config = make_config(folder / "quantized", [1, 3])
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="bfloat16"))
    return config, TargetModel.load(config, device)


def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return [R, out] in float64 for rows of bfloat16, rounded to e4m3 one by one, and a dequantized weight."""
    made = []
    for row in rows.double():
        factor = (row.abs().max().float() / 448).double()
        made.append(((row / factor).float().to(torch.float8_e4m3fn).double() * factor) @ weight.double().T)
    return torch.stack(made)


@pytest.mark.parametrize("layout", CHANNELS)
def test_a_layer_multiplies_the_numbers_of_the_checkpoint(layout: str, tmp_path: Path) -> None:
    _, model = make_model(tmp_path, layout)
    exact = TargetModel.load(make_config(tmp_path / "quantized", [1, 3]), CPU)
    use_stored_numbers(model.decoder, tmp_path / "quantized", "model.", CPU)
    name = "layers.1.mlp.down_proj"
    layer, weight = model.decoder.get_submodule(name), dict(exact.decoder.named_parameters())[f"{name}.weight"]
    rows = torch.randn(2, 5, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    assert isinstance(layer, Fp8Linear)
    expected = multiply(rows.flatten(0, 1), weight).reshape(2, 5, -1)
    torch.testing.assert_close(layer(rows).double(), expected, rtol=2**-8, atol=1e-3 * float(expected.abs().max()))


def test_taps_are_near_those_of_dequantized_weights(tmp_path: Path) -> None:
    _, model = make_model(tmp_path, "compressed per channel")
    input_ids = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    plain, flops = model.forward(input_ids), ForwardFlops(model.decoder)
    use_stored_numbers(model.decoder, tmp_path / "quantized", "model.", CPU)
    linears = [module for module in model.decoder.layers.modules() if isinstance(module, nn.Linear)]  # type: ignore[union-attr]
    assert {type(module) for module in linears} == {Fp8Linear}
    assert vars(ForwardFlops(model.decoder)) == vars(flops)
    for exact, found in zip(plain, model.forward(input_ids), strict=True):
        error = float((found.float() - exact.float()).norm() / exact.float().norm())
        assert 1e-4 < error < 0.1


def test_a_bias_is_added() -> None:
    plain = nn.Linear(32, 48, dtype=torch.bfloat16)
    without = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    rows, stored = torch.randn(3, 32).bfloat16(), quantize(plain.weight.data)
    assert torch.equal(Fp8Linear(plain, *stored)(rows), Fp8Linear(without, *stored)(rows) + plain.bias)


def test_a_random_target_is_quantized(tmp_path: Path) -> None:
    _, model = make_model(tmp_path, "modelopt")
    quantize_linears(model.decoder)
    assert isinstance(model.decoder.get_submodule("layers.0.self_attn.q_proj"), Fp8Linear)


def test_weights_in_blocks_are_not_computed_in_fp8(tmp_path: Path) -> None:
    _, model = make_model(tmp_path, "fp8 blocks")
    with pytest.raises(ConfigError, match=r"targets\.precision: needed FP8 weights with a scale per tensor or channel"):
        use_stored_numbers(model.decoder, tmp_path / "quantized", "model.", CPU)


def test_a_cpu_and_another_dtype_are_refused(tmp_path: Path) -> None:
    config, _ = make_model(tmp_path, "modelopt")
    config = msgspec.structs.replace(config, targets=TargetsConfig(devices=["cpu"], precision="checkpoint"))
    with pytest.raises(ConfigError, match=r"targets\.precision: needed a GPU of compute capability 9\.0 or more .*, found cpu"):
        TargetModel.load(config, CPU)
    for dtype, device in (("bfloat16", "cpu"), ("float32", "cuda:0")):
        settings = [f"model.dtype={dtype}", f'targets.devices=["{device}"]', "targets.precision=checkpoint"]
        with pytest.raises(ConfigError, match=r'targets\.precision: needed "model", or model\.dtype = "bfloat16" and'):
            load(Path("launch/configs/tiny.toml"), settings)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", CHANNELS)
def test_taps_on_a_gpu_are_near_those_of_dequantized_weights(layout: str, tmp_path: Path) -> None:
    gpu = torch.device("cuda:0")
    config, model = make_model(tmp_path, layout, gpu)
    targets = TargetsConfig(devices=["cuda:0"], precision="checkpoint")
    in_fp8 = TargetModel.load(msgspec.structs.replace(config, targets=targets), gpu)
    assert isinstance(in_fp8.decoder.get_submodule("layers.0.self_attn.q_proj"), Fp8Linear)
    input_ids = torch.randint(0, VOCABULARY, (2, 9), device=gpu)
    for exact, found in zip(model.forward(input_ids), in_fp8.forward(input_ids), strict=True):
        error = float((found.float() - exact.float()).norm() / exact.float().norm())
        assert 1e-4 < error < 0.1
