"""Small runs for the tests of the exchange: configurations, plans, and slots in real shared memory."""

import os

import numpy as np
from numpy.typing import NDArray

from common.actor.messages import Incarnation
from common.config import (
    ActorsConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    PlanConfig,
    RingConfig,
    TargetsConfig,
)
from common.draft_config import DraftConfig
from common.ring import memory
from common.ring.slot_table import SlotTable, table_bytes
from common.target_shape import TargetShape
from services.exchange.leases import Leases
from services.exchange.plan import Plan
from services.exchange.router import Router

PLAN_HASH = b"plan" * 4
LENGTHS = np.array([3, 8, 5, 7, 2, 8, 6, 4, 1, 5, 8], np.int32)
EVAL_LENGTHS = np.array([4, 7, 8], np.int32)


SHAPE = TargetShape(
    model_type="qwen3",
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=16,
    vocab_size=32,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def make_config(
    *,
    num_targets: int = 1,
    num_drafters: int = 1,
    num_slots: int = 2,
    batches_per_step: int = 2,
    samples: int = 2,
    buckets: tuple[int, ...] = (8,),
    max_tokens: int = 16,
    epochs: int = 1,
    seed: int = 0,
    every_steps: int = 0,
) -> Config:
    """A configuration with no model and no data behind it."""
    return Config(
        seed=seed,
        model=ModelConfig(path="none", random_init=True),
        draft=DraftConfig(mask_token_id=0, num_layers=1, tap_layers=[0, 1]),
        data=DataConfig(path="none"),
        plan=PlanConfig(
            bucket_lengths=list(buckets),
            max_tokens_per_batch=max_tokens,
            max_samples_per_batch=samples,
            batches_per_step=batches_per_step,
            epochs=epochs,
        ),
        ring=RingConfig(num_slots=num_slots),
        targets=TargetsConfig(devices=["cpu"] * num_targets),
        drafters=ActorsConfig(devices=["cpu"] * num_drafters),
        evaluation=EvaluationConfig(every_steps=every_steps),
        target_shape=SHAPE,
    )


def make_plan(config: Config, lengths: NDArray[np.int32] = LENGTHS, eval_lengths: NDArray[np.int32] = EVAL_LENGTHS) -> Plan:
    """The plan of a few samples."""
    return Plan(config, lengths, eval_lengths)


def make_table(num_slots: int) -> SlotTable:
    """A slot table in fresh shared memory."""
    fd = memory.create("test-control", table_bytes(num_slots))
    try:
        return SlotTable(fd, num_slots)
    finally:
        os.close(fd)


def make_router(config: Config, plan: Plan, table: SlotTable) -> Router:
    """An exchange that has just started."""
    return Router(plan, PLAN_HASH, Leases(table, config.num_targets), config.num_drafters)


def make_incarnation(role: str, index: int = 0, number: int = 1) -> Incarnation:
    """Return the `number`-th incarnation of an actor."""
    return Incarnation(role, index, 1000 * number + {"target": 100, "drafter": 200, "supervisor": 300}[role] + index, number)
