"""Configurations outside their ranges are refused when they are made, not when they are used."""

from math import inf, nan

import pytest

from agentic_ring.errors import ConfigError, UnknownNameError
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.baselines import BehaviorCloningConfig, DecisionTransformerConfig
from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.lora import LoraConfig
from agentic_ring.models.transformer_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    QueryScaling,
    TransformerConfig,
    YarnScaling,
)
from agentic_ring.training.optimizer import OptimizerConfig
from agentic_ring.training.td3 import OfflineTD3Config, TD3Config

SIZES = {"width": 32, "layers": 2, "heads": 4, "ffn_width": 48}
STACK = {"transformer": TransformerConfig(**SIZES)}
INPUTS = {"observation_dim": 3, "action_dim": 2}
WHOLE = (0, -1, 2.5, "2", True, nan)
POSITIVE = (0, -1.0, nan, inf, "1", True)
CONTEXTS = {"original_context": 8, "context": 16}
AGENTIC = STACK | INPUTS | {"max_timestep": 8}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OFFLINE = {"learner": TD3Config(horizon=1), "updates": 400}
STACK_SIZES = "width heads ffn_width kv_heads head_size head_groups ffn_chunk window"
RANGES = (
    (TransformerConfig, SIZES, STACK_SIZES, WHOLE),
    (TransformerConfig, SIZES | {"window": 5}, "global_every", WHOLE),
    (TransformerConfig, SIZES, "layers", (*WHOLE[1:], 10**9)),
    (TransformerConfig, SIZES, "rope_theta query_pre_attn_scalar attention_cap", POSITIVE),
    (TransformerConfig, SIZES | {"window": 5}, "local_rope_theta", POSITIVE),
    (TransformerConfig, SIZES, "norm_epsilon", (*POSITIVE, 1.0)),
    (LlamaConfig, STACK, "vocab_size", (*WHOLE, 1, 2**31)),
    (LlamaConfig, STACK, "loss_chunk", WHOLE),
    (LlamaConfig, STACK, "logit_cap", POSITIVE),
    (LlamaConfig, STACK, "context", ("4096", 0)),
    (AgenticTransformerConfig, AGENTIC, "observation_dim action_dim max_timestep action_modes", WHOLE),
    (AgenticTransformerConfig, AGENTIC, "trajectory_index", (-1, 0.5)),
    (AgenticTransformerConfig, AGENTIC, "dropout", (-0.1, 1.0, nan)),
    (DecisionTransformerConfig, INPUTS | {"max_timestep": 8}, "window max_timestep", WHOLE),
    (BehaviorCloningConfig, INPUTS, "layers window", WHOLE),
    (LoraConfig, {}, "rank", WHOLE),
    (LoraConfig, {"rank": 2}, "scale", POSITIVE),
    (QueryScaling, {"scale": 0.1}, "floor", WHOLE),
    (QueryScaling, {"floor": 8}, "scale", (nan, "1")),
    (LinearScaling, {}, "factor", POSITIVE),
    (DynamicScaling, {"factor": 2.0} | CONTEXTS, "original_context context", WHOLE),
    (YarnScaling, {"factor": 2.0, "original_context": 8}, "factor attention_factor", POSITIVE),
    (Llama3Scaling, LLAMA3, "original_context", WHOLE),
    (OptimizerConfig, {}, "learning_rate clip_norm muon_learning_rate", POSITIVE),
    (OptimizerConfig, {}, "accumulation", WHOLE),
    (OptimizerConfig, {}, "warmup_steps", (-1,)),
    (TD3Config, {}, "bc_alpha", POSITIVE),
    (OfflineTD3Config, OFFLINE, "updates checkpoint_every", (0, 120)),
)


def test_a_value_out_of_range_is_named():
    for make, others, names, values in RANGES:
        for name in names.split():
            for value in values:
                with pytest.raises(ConfigError, match=rf"^{name} is "):
                    make(**{**others, name: value})


def test_an_unknown_name_is_named():
    for name in ("dtype", "remat", "activation", "attention_strategy", "attention_kernel"):
        with pytest.raises(UnknownNameError, match=f"{name} 'other'"):
            TransformerConfig(**SIZES, **{name: "other"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_size": 2, "rope_scaling": DynamicScaling(2.0, 8, 16)}, "this one is 2"),
        ({"width": 33}, "width 33 over 4 heads"),
        ({"head_size": 7}, "head dimension"),
        ({"kv_heads": 3}, "kv_heads 3"),
        ({"head_groups": 3}, "head_groups 3"),
        ({"global_every": 2}, "global_every is 2"),
        ({"local_rope_theta": 2}, "local_rope_theta is 2"),
    ],
)
def test_values_that_do_not_fit_each_other(changes, named):
    with pytest.raises(ConfigError, match=named):
        TransformerConfig(**{**SIZES, **changes})
    with pytest.raises(ConfigError, match=r"high_freq_factor 1\.0"):
        Llama3Scaling(8.0, 4.0, 1.0, 8192)
