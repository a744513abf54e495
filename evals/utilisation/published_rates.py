"""Rates of a GPU as others measured them, to project from where no accelerator can be measured."""

from evals.compile.hardware import HARDWARE
from evals.utilisation.projection import KernelRates, Rates

_H100 = HARDWARE["h100"]

# Products: 780 TFLOP/s, https://gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405, a bare product
# at its best; norms and rotations come on top, so this is an upper bound. Attention, 16384 tokens, 16
# heads of 128: the records of openxla/tokamax in data/autotuning/nvidia_h100_80gb_hbm3, cuDNN forward
# (645 causal, 694 full) and Mosaic backward (452, 455).
PUBLISHED = Rates(
    products=780e12,
    head=780e12,
    causal=KernelRates(645e12, 452e12),
    full=KernelRates(694e12, 455e12),
    link=_H100.link_bandwidth,
    collective=_H100.link_bandwidth,
    memory=_H100.memory_bandwidth,
    peak=_H100.flops,
)
"""Of an H100 SXM in bfloat16."""
