"""Configurations of models outside their ranges are refused when they are made, not when they are used."""

from math import inf, nan

import pytest

from agentic_ring.errors import ConfigError, UnknownNameError
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.baselines import BehaviorCloningConfig, DecisionTransformerConfig
from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.lora import LoraConfig
from agentic_ring.models.rotary import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from agentic_ring.models.transformer_config import QueryScaling, TransformerConfig

SIZES = {"width": 32, "layers": 2, "heads": 4, "ffn_width": 48}
STACK = TransformerConfig(**SIZES)
INPUTS = {"observation_dim": 3, "action_dim": 2}
WHOLE = (0, -1, 2.5, "2", True, nan)
POSITIVE = (0, -1.0, nan, inf, "1", True)


def cases(make, name: str, values, **others):
    return [pytest.param(make, {**others, name: value}, name, id=f"{name}={value}") for value in values]


@pytest.mark.parametrize(
    ("make", "fields", "name"),
    [
        *(
            case
            for name in (
                *SIZES,
                "kv_heads",
                "head_size",
                "head_groups",
                "ffn_chunk",
                "window",
                "global_every",
            )
            if name != "layers"
            for case in cases(TransformerConfig, name, WHOLE, **SIZES)
        ),
        *cases(TransformerConfig, "layers", (*WHOLE[1:], 10**9), **SIZES),
        *(
            case
            for name in ("rope_theta", "local_rope_theta", "query_pre_attn_scalar", "attention_cap")
            for case in cases(TransformerConfig, name, POSITIVE, **SIZES)
        ),
        *cases(TransformerConfig, "norm_epsilon", (*POSITIVE, 1.0), **SIZES),
        *cases(LlamaConfig, "vocab_size", (*WHOLE, 1, 2**31), transformer=STACK),
        *cases(LlamaConfig, "loss_chunk", WHOLE, transformer=STACK),
        *cases(LlamaConfig, "logit_cap", POSITIVE, transformer=STACK),
        *cases(LlamaConfig, "context", ("4096", 0), transformer=STACK),
        *(
            case
            for name in ("observation_dim", "action_dim", "max_timestep", "action_modes")
            for case in cases(
                AgenticTransformerConfig, name, WHOLE, transformer=STACK, **{"max_timestep": 8, **INPUTS}
            )
        ),
        *cases(
            AgenticTransformerConfig,
            "trajectory_index",
            (-1, 0.5),
            transformer=STACK,
            max_timestep=8,
            **INPUTS,
        ),
        *cases(DecisionTransformerConfig, "window", WHOLE, max_timestep=8, **INPUTS),
        *cases(BehaviorCloningConfig, "layers", WHOLE, **INPUTS),
        *cases(LoraConfig, "rank", WHOLE),
        *cases(LoraConfig, "scale", POSITIVE, rank=2),
        *cases(QueryScaling, "floor", WHOLE, scale=0.1),
        *cases(QueryScaling, "scale", (nan, "1"), floor=8),
        *cases(LinearScaling, "factor", POSITIVE),
        *cases(DynamicScaling, "context", WHOLE, factor=2.0, original_context=8),
        *cases(DynamicScaling, "original_context", WHOLE, factor=2.0, context=8),
        *cases(YarnScaling, "factor", POSITIVE, original_context=8),
        *cases(YarnScaling, "attention_factor", POSITIVE, factor=2.0, original_context=8),
        *cases(
            Llama3Scaling,
            "original_context",
            WHOLE,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ],
)
def test_a_value_out_of_range_is_named(make, fields, name):
    with pytest.raises(ConfigError, match=rf"^{name} is .*; it must be"):
        make(**fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float64"),
        ("dtype", "float16"),
        ("remat", "some"),
        ("activation", "relu"),
        ("attention_strategy", "star"),
        ("attention_kernel", "fast"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(name, value):
    with pytest.raises(UnknownNameError, match=f"unknown {name} '{value}'; choose one of: "):
        TransformerConfig(**SIZES, **{name: value})


def test_dynamic_scaling_needs_more_than_one_wave():
    with pytest.raises(ConfigError, match="at least 4"):
        TransformerConfig(**SIZES, head_size=2, rope_scaling=DynamicScaling(2.0, 8, 16))
