"""Hybrid targets on a GPU, on the kernels of flash-linear-attention.

These kernels tune themselves for every shape, which takes long: all tests use one.
"""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from transformers import Qwen3_5TextConfig

from common.config import ActorsConfig, Config, DataConfig, ModelConfig, PlanConfig, SyntheticConfig, TargetsConfig
from common.draft_config import DraftConfig
from common.target_shape import read_target_shape
from services.target.linear_attention import causal_convolution
from services.target.loading import load_decoder
from services.target.model import TargetModel

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the kernels' warnings are not ours
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
VOCABULARY = 512
LENGTHS = [200, 64, 1, 129]
CHANNELS = (2 * 2 + 6) * 128  # of the convolution: queries, keys, values


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A random hybrid target of four layers, with heads of the real sizes."""
    folder = tmp_path_factory.mktemp("hybrid")
    Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_value_heads=6,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        initializer_range=0.1,
    ).save_pretrained(folder)
    return Config(
        model=ModelConfig(path=str(folder), random_init=True, dtype="bfloat16"),
        draft=DraftConfig(mask_token_id=VOCABULARY - 1, tap_layers=[0, 3], dtype="bfloat16"),
        data=DataConfig(synthetic=SyntheticConfig(num_samples=1, num_eval_samples=1, min_length=2, max_length=2)),
        plan=PlanConfig(bucket_lengths=[256], max_tokens_per_batch=1024, batches_per_step=1),
        targets=TargetsConfig(devices=["cuda:0"]),
        drafters=ActorsConfig(devices=["cuda:0"]),
        target_shape=read_target_shape(Path(folder)),
    )


@pytest.fixture(scope="module")
def model(config: Config) -> TargetModel:
    pytest.importorskip("fla")
    return TargetModel.load(config, GPU)


def make_rows(padding: int) -> torch.Tensor:
    rows = torch.full((len(LENGTHS), max(LENGTHS)), padding)
    random = torch.Generator().manual_seed(1)
    for row, length in zip(rows, LENGTHS, strict=True):
        row[:length] = torch.randint(VOCABULARY, (length,), generator=random)
    return rows


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative difference, in norm."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def test_what_stands_in_the_padding_changes_no_bit(model: TargetModel) -> None:
    one, other = (model.forward(make_rows(padding).to(GPU)) for padding in (0, VOCABULARY - 2))
    for tap, same in zip(one, other, strict=True):
        for row, again, length in zip(tap, same, LENGTHS, strict=True):
            assert torch.equal(row[:length], again[:length])


def test_each_row_is_its_document_alone_as_torch_computes_it_on_a_cpu(model: TargetModel, config: Config) -> None:
    """In float32 on the CPU, from the weights of the GPU: the seed makes the same bits in bfloat16 on both."""
    exact = TargetModel.load(config, CPU)
    nn.Module.float(exact.decoder)
    rows = make_rows(0)
    together = model.forward(rows.to(GPU))
    for row, length in enumerate(LENGTHS):
        for tap, alone in zip(together, exact.forward(rows[row : row + 1, :length]), strict=True):
            assert difference(tap[row, :length], alone[0]) < 3e-2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_compiled_layers_give_the_same_states_and_wait_for_nothing(model: TargetModel, config: Config) -> None:
    """Each in one piece: the compiler does not enter the kernels, and nothing is compiled a second time."""
    compiled = TargetModel.load(config, GPU)
    compiled.compile_layers()
    counters.clear()
    rows = make_rows(0).to(GPU)
    for tap, expected in zip(compiled.forward(rows), model.forward(rows), strict=True):
        assert difference(tap, expected) < 3e-2
    assert not counters["graph_break"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled.forward(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_buffers_are_computed_on_the_gpu_as_on_the_cpu(model: TargetModel, config: Config) -> None:
    on_cpu = dict(TargetModel.load(config, CPU).decoder.named_buffers())
    for name, buffer in model.decoder.named_buffers():
        assert buffer.device.type == "cuda"
        assert buffer.dtype == on_cpu[name].dtype
        torch.testing.assert_close(buffer.cpu(), on_cpu[name], rtol=1e-6, atol=0)


def test_read_weights_are_the_made_ones_on_the_gpu(model: TargetModel, config: Config, tmp_path: Path) -> None:
    """Saved and read again, straight to the GPU, from files in two dtypes."""
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        whole, _ = load_decoder(config, [CPU])
        nn.Module.to(whole, dtype)
        whole.save_pretrained(folder)
        read = msgspec.structs.replace(config, model=ModelConfig(path=str(folder), dtype="bfloat16"))
        parameters = dict(TargetModel.load(read, GPU).decoder.named_parameters())
        for name, made in model.decoder.named_parameters():
            assert parameters[name].device.type == "cuda"
            assert torch.equal(parameters[name], made), name


def test_the_convolution_is_the_one_of_torch() -> None:
    pytest.importorskip("fla")
    random = torch.Generator(GPU).manual_seed(2)
    num_rows, length = len(LENGTHS), max(LENGTHS)
    states = torch.randn(num_rows, length, CHANNELS, device=GPU, generator=random).bfloat16().transpose(1, 2)
    weight = torch.randn(CHANNELS, 4, device=GPU, generator=random).bfloat16()
    wide = functional.conv1d(states.double(), weight.double().unsqueeze(1), padding=3, groups=CHANNELS)
    found = causal_convolution(states, weight, None, activation="silu")
    assert found.shape == states.shape
    assert found.transpose(1, 2).is_contiguous()
    assert difference(found, functional.silu(wide[:, :, :length])) < 5e-3
