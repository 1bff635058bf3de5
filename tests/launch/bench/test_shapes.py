"""The models of the measurements: their published sizes, and runs that can be started."""

import pytest

from common.config import Config
from launch.bench.shapes import SHAPES, count_parameters, random_run

NUM_PARAMETERS = {  # of the language models, with head; Qwen3.6-27B's files hold 27.78 G with vision and prediction layers
    "qwen3_8b": 8_190_735_360,
    "qwen3_6_27b": 26_895_998_464,
}


def head_and_norm(config: Config) -> int:
    return (config.shape.vocab_size + 1) * config.shape.hidden_size


@pytest.mark.parametrize("shape", SHAPES)
def test_the_targets_have_the_published_number_of_parameters(shape: str) -> None:
    config = random_run(shape, 2048)
    assert count_parameters(config, config.shape.num_hidden_layers) + head_and_norm(config) == NUM_PARAMETERS[shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_settings_given_last_win(shape: str) -> None:
    config = random_run(shape, 2048, ["plan.bucket_lengths=[512]", "ring.num_slots=2"])
    assert config.plan.bucket_lengths == [512]
    assert config.ring.num_slots == 2
    assert config.model.random_init
