"""NVIDIA GPUs: cuDNN's flash attention, on one tile of static mask.

JAX's public entry point rounds the logsumexp to the dtype of the output and ignores its gradient, so
the forward and backward that it is made of are called here. They are private to JAX; everything that
depends on them is in this file. What cuDNN returns for the output and the gradients is in the dtype of
the inputs, summed in float32 and rounded once per tile.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.attention.kernels.interface import Gradients, Saved, SoftmaxState, Tile, only_rows, refuse
from agentic_ring.attention.mask import HopMask


@dataclass(frozen=True)
class CudnnKernel:
    """See ``Kernel``; serves whole tiles, and causal ones on the diagonal, with a window or without.

    Its forward takes lengths of the keys of each row. Grouped queries share their keys without a copy. Head
    dimensions go up to 256 on Hopper and later, to 128 before and where a program is compiled without a GPU.
    """

    def forward(self, tile: Tile) -> SoftmaxState:
        q, k, v, mask, scores = tile
        library = _library()
        _refuse(library, tile)
        lengths: dict[str, Any] = {}
        if mask.key_lengths is not None:
            # cuDNN says nothing of a row without a key, so that it is given one.
            lengths["kv_seqlen"] = jnp.maximum(mask.key_lengths, 1)
            lengths["q_seqlen"] = jnp.full_like(mask.key_lengths, q.shape[1])
        static = {"scale": scores.scale, "sliding_window_length": mask.spec.window, "return_residual": True}
        mask_type = _mask_type(library, mask)
        output, logsumexp = library.dot_product_attention(q, k, v, mask_type=mask_type, **static, **lengths)
        state = SoftmaxState(output.astype(jnp.float32), logsumexp.swapaxes(1, 2))
        return state if mask.key_lengths is None else only_rows(state, mask.key_lengths[:, None] > 0)

    def backward(self, tile: Tile, saved: Saved) -> Gradients:
        q, k, v, mask, scores = tile
        library = _library()
        _refuse(library, tile)
        refuse(
            (saved.d_logsumexp is not None, "the logsumexp has a gradient"),
            (mask.key_lengths is not None, "a backward with lengths of the keys"),
        )
        none = jnp.zeros(0, q.dtype)
        # By name, because versions of JAX differ in how many there are and in their order.
        static: dict[str, Any] = {
            "scale": scores.scale,
            "seed": 42,  # of the dropout, which is none; cuDNN's configuration needs one
            "dropout_rate": 0.0,
            "variadic_args": (False, False),  # no bias, no gradient of one
            "mask_type": _mask_type(library, mask),
            "layout": library.AttentionLayout.BTNH.value,
            "sliding_window_length": mask.spec.window,
            "score_mod": None,
            "is_training": True,
            "cudnn_version": None,
            "return_residual": False,
        }
        # q, k, v; then bias, two lengths, two offsets and two page tables, all absent.
        residuals: list[Any] = [q, k, v, *(none,) * 7]
        rule = library._dot_product_attention_bwd_rule
        parameters = inspect.signature(rule).parameters
        if "score_mod" in parameters:
            residuals.append(())  # its arguments
        residuals += [saved.logsumexp.swapaxes(1, 2), saved.output.astype(q.dtype)]
        try:
            arguments = {name: static[name] for name in parameters if name not in ("res", "grad_output")}
            arguments |= {"res": tuple(residuals), "grad_output": saved.d_output.astype(q.dtype)}
            dq, dk, dv = rule(**arguments)[:3]
        except (KeyError, ValueError) as error:
            raise NotImplementedError(f"jax {jax.__version__} has another cuDNN backward: {error}") from error
        return Gradients(*(gradient.astype(jnp.float32) for gradient in (dq, dk, dv)))


_PRIVATE = (
    "AttentionLayout",
    "MaskType",
    "_dot_product_attention_bwd_rule",
    "check_cudnn_version",
    "check_is_flash_attention",
    "dot_product_attention",
)
"""Names of the private module that are used here."""


def _library() -> Any:
    try:
        from jax._src.cudnn import fused_attention_stablehlo
    except ImportError as error:
        raise NotImplementedError(f"jax {jax.__version__} has no cuDNN attention: {error}") from error
    if missing := [name for name in _PRIVATE if not hasattr(fused_attention_stablehlo, name)]:
        raise NotImplementedError(f"jax {jax.__version__} has another cuDNN attention, without {missing[0]}")
    return fused_attention_stablehlo


def _mask_type(library: Any, mask: HopMask) -> Any:
    types = library.MaskType
    if mask.key_lengths is not None:
        return types.PADDING_CAUSAL if mask.spec.causal else types.PADDING
    return types.CAUSAL if mask.spec.causal else types.NO_MASK


def _refuse(library: Any, tile: Tile) -> None:
    """Refuses what cuDNN cannot do, or what JAX does not pass on to it."""
    q, k, v, mask, scores = tile
    causal, head_dim, dtypes = mask.spec.causal, q.shape[3], {jnp.dtype(x.dtype).name for x in (q, k, v)}
    refuse(
        (mask.query.positions is not None, "tokens have positions of their own"),
        (mask.query.segment_ids is not None, "segment ids"),
        (mask.spec.prefix > 0, "the mask has a prefix"),
        (mask.spec.window is not None and not causal, "a window both ways"),
        (causal and (mask.offset != 0 or q.shape[1] != k.shape[1]), "a causal tile off the diagonal"),
        (scores.soft_cap is not None, "a soft cap"),
        (scores.dropout is not None, "dropout"),
        (
            dtypes not in ({"bfloat16"}, {"float16"}),
            f"dtype {'/'.join(dtypes)}; takes bfloat16 or float16",
        ),
        (head_dim != v.shape[3], f"keys of {head_dim} numbers and values of {v.shape[3]}"),
        (head_dim % 8 != 0, f"head dimension {head_dim} is no multiple of 8"),
    )
    try:
        version = library.check_cudnn_version()
    except RuntimeError as error:
        raise NotImplementedError("cuDNN is not installed") from error
    # Also knows the head dimensions of each GPU, 128 where none is attached. The forward asks the same
    # of itself; were the backward not to ask, it would compile what cuDNN then fails to run.
    library.check_is_flash_attention(
        q, k, v, library.AttentionLayout.BTNH.value, version, has_bias=False, is_training=True
    )
