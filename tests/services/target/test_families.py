"""Every family that transformers runs: the taps are its own hidden states, whatever stands in the padding."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from common.target_shape import TargetShape, read_target_shape
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.selector import soft_cap
from services.target.flops import ForwardFlops
from tests.builders.families import TEXT, VOCABULARY, WRAPPERS, format_table, load_unchecked, make_family, make_family_config
from tests.builders.whole_models import CPU, make_config

TAPS = [0, 1, 2]  # of four layers
LENGTH, PADDING = 13, 3
NAMES = [name for name in TEXT | WRAPPERS if name in CONFIG_MAPPING]  # earlier versions of transformers know fewer


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More threads cost more than they save in models so small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    gc.collect()


def reference(model: PreTrainedModel, input_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return what transformers records behind each layer; the mean of the streams of hyper-connections."""
    whole: Any = model if model.config.model_type != "llama4" else model.language_model  # whose wrapper records nothing
    states = whole(input_ids=input_ids, output_hidden_states=True, use_cache=False).hidden_states
    return [states[layer + 1].mean(2) if states[1].dim() == 4 else states[layer + 1] for layer in TAPS]


@pytest.mark.parametrize("name", NAMES)
def test_taps_are_the_hidden_states_of(name: str, tmp_path: Path) -> None:
    model = make_family(name)
    model.save_pretrained(tmp_path)
    config = make_config(tmp_path, TAPS)
    target = load_unchecked(config)
    input_ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([input_ids, torch.full((2, PADDING), 7)], dim=1)
    taps, longer = target.forward(input_ids), target.forward(padded)
    for tap, beside_padding, needed in zip(taps, longer, reference(model, input_ids), strict=True):
        largest = float(needed.abs().max())
        torch.testing.assert_close(tap, needed, rtol=0, atol=1e-6 * largest)
        torch.testing.assert_close(beside_padding[:, :LENGTH], tap, rtol=0, atol=5e-6 * largest)
    embedding, head = load_embedding_and_head(config, CPU)
    assert torch.equal(embedding, model.get_input_embeddings().weight)  # type: ignore[arg-type]
    assert torch.equal(head, model.get_output_embeddings().weight)  # type: ignore[no-untyped-call]
    if any(parameter.endswith("experts.gate_up_proj") for parameter, _ in target.decoder.named_parameters()):
        grouped = "llama4" not in name  # which services/target/experts.py groups on a GPU
        assert (target.decoder.config._experts_implementation == "grouped_mm") is grouped
    assert ForwardFlops(target.decoder).of(np.array([LENGTH])) > 0
    target._check_embedding(config.shape.embedding_scale, CPU)


@pytest.mark.parametrize("name", TEXT)
def test_logits_are_those_of_the_head_scaled_and_capped_for(name: str, tmp_path: Path) -> None:
    """The keys of each family decide; numbers other than 1 where its configuration has a default of 1."""
    keys = {"logits_scaling": 4.0} if name.startswith("granite") or name == "hyperclovax" else {}
    model = make_family(name, **keys, **({"lm_head_multiplier": 0.25} if name == "falcon_h1" else {}))
    model.save_pretrained(tmp_path)
    shape, head, given = read_target_shape(tmp_path), model.get_output_embeddings(), []  # type: ignore[no-untyped-call]
    assert (getattr(head, "bias", None) is not None) == (name in ("gptj", "phi"))  # 0 here; left out of a draft's logits
    head.register_forward_pre_hook(lambda module, arguments: given.append(arguments[0]))
    logits = model(input_ids=torch.arange(1, 9)[None], use_cache=False).logits
    scale = 1.0 if name == "minicpm3" else shape.logit_scale  # which divides what enters its head
    expected = soft_cap(given[0] @ head.weight.T * scale, shape.logit_softcap)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    if name in ("cohere", "granite", "falcon_h1"):
        assert shape.logit_scale != 1.0
    if name in ("gemma2", "vaultgemma"):
        assert shape.logit_softcap > 0.0


def test_a_process_without_torch_reads_the_same_shapes(tmp_path: Path) -> None:
    for name in NAMES:
        make_family_config(name).save_pretrained(tmp_path / name)
    program = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from common.decoder_config import derive_shape
import msgspec
print(msgspec.json.encode([derive_shape(Path(path)) for path in sys.argv[1:]]).decode())
"""
    line = [sys.executable, "-c", program, *(str(tmp_path / name) for name in NAMES)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    shapes = msgspec.json.decode(done.stdout, type=list[TargetShape])
    needed = [msgspec.structs.replace(read_target_shape(tmp_path / name), source="") for name in NAMES]
    assert shapes == needed


def test_the_table_in_the_readme_is_that_of_the_tests() -> None:
    assert f"\n{format_table()}\n" in Path("services/target/README.md").read_text()
