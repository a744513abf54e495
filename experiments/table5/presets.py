"""Sizes of Table 5: the main job's presets, and the training of the baselines beside them.

``paper`` and ``small`` train the baselines by their published recipes, ``demo`` in a minute on 2 cores.
"""

from dataclasses import dataclass, replace
from typing import Any

from agentic_ring.data.domains import Domain
from agentic_ring.data.rewards.tasks import POSITIONS
from agentic_ring.training.forward_backward import ForwardBackwardConfig
from agentic_ring.training.fre import FREConfig
from agentic_ring.training.optimizer import OptimizerConfig, TrainConfig
from agentic_ring.training.td3 import OfflineTD3Config, TD3Config
from experiments.exorl.presets import PRESETS, Preset
from experiments.exorl.told_presets import GOAL_PRESETS, TOLD_PRESETS, ToldPreset


@dataclass(frozen=True)
class TablePreset:
    """A size of the whole table.

    Attributes:
      chains: the Agentic Transformer's preset; each column sets its own number of trajectories.
      cloning, decision, values: training of behaviour cloning, the Decision Transformer, and TD3 (+BC).
      told, encoding, forward_backward: training on a domain of the model that trajectories tell the task, of
        FRE, and of FB.
      methods, seeds: default columns, and number of training seeds per cell.
    """

    chains: Preset
    cloning: TrainConfig
    decision: TrainConfig
    values: OfflineTD3Config
    told: ToldPreset
    encoding: FREConfig
    forward_backward: ForwardBackwardConfig
    methods: tuple[str, ...]
    seeds: int

    def for_domain(self, domain: Domain) -> "TablePreset":
        """The preset with every method's updates lengthened as those of the chains; see ``Preset``."""
        factor = self.chains.lengthening.get(domain.name, 1)

        def longer(training: Any, length: str) -> Any:
            numbers = {name: factor * getattr(training, name) for name in (length, "checkpoint_every")}
            return replace(training, **numbers)

        return replace(
            self,
            chains=self.chains.for_domain(domain),
            cloning=longer(self.cloning, "steps"),
            decision=longer(self.decision, "steps"),
            values=longer(self.values, "updates"),
            told=(GOAL_PRESETS[self.told.name] if domain.name in POSITIONS else self.told).for_domain(domain),
            encoding=longer(self.encoding, "updates"),
            forward_backward=longer(self.forward_backward, "updates"),
        )


_BASELINES = ("random", "bc", "bc10", "dt", "td3", "td3_bc")

# kzl/decision-transformer: gym/experiment.py, of Decision Transformer and behaviour cloning alike.
_WINDOWS = TrainConfig(
    steps=100_000,
    batch_size=64,
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000, final_fraction=1.0),
    checkpoint_every=10_000,
    log_every=100,
)
_DEMO_WINDOWS = replace(
    _WINDOWS,
    log_every=20,
    optimizer=replace(_WINDOWS.optimizer, learning_rate=1e-3, warmup_steps=100),
)
# denisyarats/exorl: config.yaml, agent/td3.yaml and agent/td3_bc.yaml.
_VALUES = OfflineTD3Config(
    TD3Config(hidden=1024, batch=1024, learning_rate=1e-4, horizon=1, discount=0.99, policy_delay=1),
    updates=500_000,
    checkpoint_every=10_000,
)
# kvfrans/fre: experiment/run_fre.py, with the updates of its README for ExoRL.
_ENCODING = FREConfig(
    updates=2_000_000,
    encoding_updates=1_000_000,
    checkpoint_every=20_000,
    hidden=512,
    functions=64,
    transitions=8,
    horizon=1,
    learning_rate=1e-4,
    discount=0.99,
    target_rate=0.001,
)
# facebookresearch/controllable_agent: agent/fb_ddpg.py and the updates of arXiv 2209.14935.
_FORWARD_BACKWARD = ForwardBackwardConfig(
    updates=1_000_000, checkpoint_every=20_000, hidden=1024, batch=1024, learning_rate=1e-4
)

TABLE_PRESETS = {
    "demo": TablePreset(
        chains=replace(PRESETS["demo"], checkpoint_every=30),
        cloning=replace(_DEMO_WINDOWS, steps=10_000, checkpoint_every=2500),
        decision=replace(_DEMO_WINDOWS, steps=2000, batch_size=16, checkpoint_every=500),
        values=replace(
            _VALUES,
            learner=replace(_VALUES.learner, hidden=256, batch=256, learning_rate=1e-3),
            updates=4000,
            checkpoint_every=1000,
        ),
        told=TOLD_PRESETS["demo"],
        forward_backward=ForwardBackwardConfig(updates=20_000, checkpoint_every=2000),
        encoding=FREConfig(updates=7000, encoding_updates=2500, checkpoint_every=500),
        methods=(*_BASELINES, "at_ring_4", "fb", "told_32", "told_128"),
        seeds=3,
    ),
    "small": TablePreset(
        chains=PRESETS["small"],
        cloning=_WINDOWS,
        decision=_WINDOWS,
        values=_VALUES,
        told=TOLD_PRESETS["small"],
        encoding=_ENCODING,
        forward_backward=_FORWARD_BACKWARD,
        methods=(*_BASELINES, "at_ring_4", "at_blockwise_4", "at_ring_32"),
        seeds=3,
    ),
}
TABLE_PRESETS["paper"] = replace(
    TABLE_PRESETS["small"],
    chains=PRESETS["paper"],
    told=TOLD_PRESETS["paper"],
    methods=(*_BASELINES, "at_memory_efficient_32", "at_blockwise_32", "at_blockwise_128", "at_ring_128"),
    seeds=5,
)
