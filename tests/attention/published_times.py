"""Published times of strategies, against which the cost model and the rule are held.

Methods are named as strategies; "ulysses_ring 4" exchanges heads among 4 devices, "gathered" attends to all
gathered keys in one call of the kernel (the strategy "all_gather" works block by block), and "unbalanced"
does so with consecutive blocks of a causal sequence. Rings are zigzag, masks causal.

Read, but without all shapes, or on links that the model does not know:

* jzhang38/EasyContext#37: Ulysses about 15% faster than a ring on 8 A100; model and length not stated.
* feifeibear/long-context-attention#40: forward, 8 heads of 128 on 8 GPUs with NVLink: Ulysses 60 ms, ring
  over 100 ms; which of two lengths, and which ring, not stated. #88: on 4 H800, Ulysses 2.7 ms against 3.4 ms
  of 2 x 2 at 1,024 tokens, but 26.7 against 23.7 at 3,600; mask not stated.
* vllm-project/vllm-omni#5092, forward, no mask, NVLink: a ring is slower than one gather by 0 to 20% on 2
  GPUs and by 3 to 99% on 4 with as many key heads as query heads, least with the longest sequences. Over PCIe
  it is faster by 3 to 29% on 2. Head counts not stated. Its BAGEL record on 4 A800: gather 170 ms per step,
  Ulysses 207, ring 237; length not stated.
* zhuzilin/ring-flash-attention#55: 5 heads of 128 on 8 H800, forward: zigzag at 55% of the kernel, where the
  model says 82%. Each hop takes 0.3 ms more than its compute; PyTorch launches it from Python, XLA does not.
* ifromeast/AI_analysis#2: 8 L20 without NVLink, 128K tokens: zigzag is faster than Ulysses with
  CUDA_DEVICE_MAX_CONNECTIONS set, slower without.
* TransformerEngine JAX, 4 GB200, packed with a window: ring 2.22 times one GPU, gather 2.36; length not
  stated. Megatron's p2p (NeMo, performance_long_sequence.md) is published without another strategy.
* AI-Hypercomputer/maxtext#4836: as #4893 below, but not balanced and 1.2 to 1.5 times slower.
"""

from dataclasses import dataclass, replace

from agentic_ring.attention.cost_model import BACKWARD, FORWARD, HARDWARE, Hardware, Pass, Shapes


@dataclass(frozen=True)
class Cell:
    """Times of several methods on one shape.

    Attributes:
      times: by method; seconds, of a training step or of attention alone; or a ratio.
      calls: calls of attention, one after another, in what was timed.
      contradicts: methods that are estimated fastest, although the measurement says otherwise.
    """

    source: str
    hardware: Hardware
    shapes: Shapes
    times: dict[str, float]
    calls: int = 1
    passes: tuple[Pass, ...] = (FORWARD, BACKWARD)
    contradicts: tuple[str, ...] = ()


# The rate of FlashAttention-2 as README of ring-flash-attention measures it, causal, 8K tokens, heads of 128.
# NCCL's share of NVLink: 220 of 300 GB/s on A100 (NVIDIA/nccl-tests#228), the same share of 200 on H800.
A100 = replace(HARDWARE["gpu"], name="A100", flops=205e12, link=220e9, collective=220e9)
H800 = replace(HARDWARE["gpu"], name="H800", flops=325e12, link=147e9, collective=147e9)


def _shapes(
    ring: int, tokens: int, heads: int, key_heads: int, head_dim: int = 128, batch: int = 1, itemsize: int = 2
) -> Shapes:
    """Shapes of a sequence of ``tokens`` over the whole ring."""
    return Shapes(ring, ring, batch, tokens // ring, heads, key_heads, head_dim, itemsize)


def _maxtext_4893(tokens: int, *times: float, contradicts: tuple[str, ...] = ()) -> Cell:
    """64 v5p chips, Llama-3-8B, one row over all of them; a block is rematerialised, so two forwards."""
    methods = ("gathered", "ring", "ulysses_ring 4", "ulysses_ring 8", "ulysses_ring 2")
    return Cell(
        f"AI-Hypercomputer/maxtext#4893, {tokens} tokens",
        HARDWARE["tpu"],
        _shapes(64, tokens, 32, 8),
        dict(zip(methods, times, strict=True)),
        calls=32,
        passes=(FORWARD, FORWARD, BACKWARD),
        contradicts=contradicts,
    )


def _long_context(shapes: Shapes, *rates: float) -> Cell:
    """README of feifeibear/long-context-attention: 8 A100 with NVLink, forward, zigzag, no_packed."""
    methods = ("ulysses", "ulysses_ring 4", "ulysses_ring 2", "ring")
    return Cell(
        f"feifeibear/long-context-attention, README, {shapes}",
        A100,
        shapes,
        {method: 1 / rate for method, rate in zip(methods, rates, strict=True)},
        passes=(FORWARD,),
    )


def _simulated(tokens: int, *times: float) -> Cell:
    """8 simulated devices on 2 CPU cores, docs/attention-performance.md."""
    methods = ("ring", "ulysses_ring 4", "all_gather")
    shapes = _shapes(8, tokens, 4, 4, 64, itemsize=4)
    return Cell(
        f"docs/attention-performance.md, {tokens} tokens",
        HARDWARE["cpu"],
        shapes,
        dict(zip(methods, times, strict=True)),
    )


CELLS = (
    # Llama-2-7B, 64 v5p chips in 4 rings, 64 rows per step. The estimate has the gather wait for 3.6 s in a
    # step, but it took no longer than Ulysses; there XLA must have hidden most of it.
    Cell(
        "AI-Hypercomputer/maxtext#4687, 32768 tokens",
        HARDWARE["tpu"],
        _shapes(16, 32768, 32, 32, batch=16),
        {"ulysses": 8.90, "gathered": 8.83, "ring": 16.38},
        calls=32,
    ),
    # "8" at 64K contradicts 128K and 256K, where it costs as little as "4" or less.
    _maxtext_4893(65536, 1.09, 1.42, 1.04, 1.20, 1.38, contradicts=("ulysses_ring 8",)),
    _maxtext_4893(131072, 2.98, 3.71, 2.88, 2.93, 3.49),
    _maxtext_4893(262144, 9.71, 10.78, 9.50, 9.34, 10.24),
    # Rings lose more than estimated, by up to 1.65 against 1.2. The 8K rows are left out: there, rates change
    # twofold between columns that run the same program.
    _long_context(_shapes(8, 32768, 32, 32, 32, 2), 76.908, 81.58, 76.818, 46.605),
    _long_context(_shapes(8, 131072, 32, 32, 32, 2), 15.829, 15.699, 15.244, 12.445),
    _long_context(_shapes(8, 131072, 8, 8, 32, 2), 57.9, 57.362, 57.404, 50.126),
    _long_context(_shapes(8, 131072, 64, 8, 32, 2), 8.37, 8.054, 8.038, 7.819),
    _long_context(_shapes(8, 131072, 8, 8, 128, 2), 21.002, 21.464, 21.201, 17.778),
    # README of zhuzilin/ring-flash-attention, 8K tokens per GPU in the shape of Llama-3-8B.
    *(
        Cell(
            f"zhuzilin/ring-flash-attention, README, {hardware.name}, {len(passes)} passes",
            hardware,
            _shapes(8, 65536, 32, 8),
            {"ring": 1 / rate},
            passes=passes,
        )
        for hardware, passes, rate in (
            (H800, (FORWARD,), 63.0),
            (H800, (FORWARD, BACKWARD), 17.4),
            (A100, (FORWARD,), 38.2),
            (A100, (FORWARD, BACKWARD), 10.6),
        )
    ),
    # GLM-4.5-Air, 8 H200, inverse tokens per second. What prime-rl calls a ring gathers the keys of one head
    # after the other, for consecutive blocks (src/prime_rl/trainer/models/layers/ring_attn.py, utils/cp.py of
    # the merged commit). It lost 29 and 32% of one GPU's rate, Ulysses 8 and -1%.
    Cell(
        "PrimeIntellect-ai/prime-rl#2418, 2 GPUs",
        HARDWARE["gpu"],
        _shapes(2, 65536, 96, 8),
        {"ulysses": 1 / 77, "unbalanced": 1 / 60},
    ),
    Cell(
        "PrimeIntellect-ai/prime-rl#2418, 4 GPUs",
        HARDWARE["gpu"],
        _shapes(4, 65536, 96, 8),
        {"ulysses": 1 / 85, "unbalanced": 1 / 57},
    ),
    _simulated(2048, 0.098, 0.079, 0.084),
    _simulated(4096, 0.33, 0.24, 0.29),
    _simulated(8192, 1.02, 0.86, 1.04),
)
