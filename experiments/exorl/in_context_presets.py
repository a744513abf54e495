"""Sizes of the hidden-task experiment, and which tasks of a domain are hidden unless others are named."""

from dataclasses import replace

from agentic_ring.models.transformer import TransformerConfig
from agentic_ring.training.optimizer import OptimizerConfig
from experiments.exorl.presets import PRESETS, Preset

HIDDEN_TASKS = {
    "walker": ("stand", "walk", "run", "run_backward"),
    "cheetah": ("run", "run_backward"),
    "quadruped": ("stand", "walk", "run", "jump"),
    "cartpole": ("swingup", "swingup_sparse"),
    # Our explorers have not found the way to the two spots on the right.
    "point_mass_maze": ("reach_top_left", "reach_bottom_left"),
    "jaco": ("reach_top_left", "reach_top_right", "reach_bottom_left", "reach_bottom_right"),
}

TOP_FRACTION = {"point_mass_maze": 0.05}
"""Share of a domain's trajectories that are among the best of a task, where it is not a tenth."""

HIDDEN_PRESETS: dict[str, Preset] = {
    # 2 cores, tens of minutes.
    "demo": replace(
        PRESETS["demo"],
        transformer=TransformerConfig(width=64, layers=3, heads=4, ffn_width=128, remat="none"),
        updates=400,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, clip_norm=1.0, beta2=0.95),
        checkpoint_every=100,
    ),
    # One accelerator: chains of 8 trajectories.
    "small": replace(PRESETS["small"], trajectories=8, prompt_trajectories=0, trials=8),
}
