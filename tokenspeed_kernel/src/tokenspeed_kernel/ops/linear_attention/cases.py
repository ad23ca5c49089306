"""Cases of the linear-attention ops: shapes, and inputs made from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.linear_attention.contract import (
    CAUSAL_CONV1D_PREFILL,
    CAUSAL_CONV1D_UPDATE,
    GDN_DECODE,
    GDN_PREFILL,
    MAMBA2_PREFILL,
    SELECTIVE_STATE_UPDATE,
)

__all__ = ["CASES", "CONV", "GDN", "MAMBA2", "Kind", "Shape", "cases_of"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """One call of an op of this family; each op reads the fields that it has.

    Attributes:
        label: what is special about it.
        lengths: tokens of each request.
        slots: slot of each request; consecutive ones from 1 when None.
        fresh: requests that start from nothing, by place; None leaves `has_initial_state` out. Their slots are filled with NaN.
        decay: mean of the gated delta rule's logarithmic decay, or factor of Mamba2's `a`.
        beta: a value for all of beta; random in 0..1 when None.
        strided: operands are slices of one projection, states of a larger pool.
    """

    label: str
    lengths: tuple[int, ...] = (3, 5)
    key_heads: int = 2
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    channels: int = 40
    width: int = 4
    slots: tuple[int, ...] | None = None
    fresh: tuple[int, ...] | None = None
    decay: float = 0.1
    beta: float | None = None
    scale: float | None = None
    l2norm: bool = True
    activation: str | None = "silu"
    with_bias: bool = True
    skip: bool = True
    gate: bool = True
    softplus: bool = True
    limit: tuple[float, float] | None = None
    float32_parameters: bool = True
    index_dtype: torch.dtype = torch.int32
    strided: bool = False
    bench: bool = False

    @property
    def num_slots(self) -> int:
        """Slots of the pool: one more than requests, and slot 0."""
        return len(self.lengths) + 2


def _common(shape: Shape, generator: torch.Generator, device: torch.device, *state: int, dtype: torch.dtype) -> dict[str, Any]:
    """The pool and the requests' places in it."""
    num_reqs = len(shape.lengths)
    slots = tuple(range(1, num_reqs + 1)) if shape.slots is None else shape.slots
    pool = torch.randn((shape.num_slots, 2, *state), generator=generator)
    states = (pool if shape.strided else pool[:, 0].contiguous()).to(device, dtype)
    states = states[:, 1] if shape.strided else states
    known = None
    if shape.fresh is not None:
        known = torch.tensor([place not in shape.fresh for place in range(num_reqs)], dtype=torch.bool)
        for place in shape.fresh:
            states[slots[place]] = math.nan
    return {
        "states": states,
        "state_indices": torch.tensor(slots, dtype=shape.index_dtype).to(device),
        "cu_seqlens": torch.tensor((0, *shape.lengths)).cumsum(0).to(device, torch.int32),
        "has_initial_state": None if known is None else known.to(device),
    }


def _split(shape: Shape, generator: torch.Generator, rows: tuple[int, ...], *sizes: tuple[int, int]) -> list[torch.Tensor]:
    """Standard normal [*rows, heads, dim] for each (heads, dim): apart, or slices of one projection."""
    made = torch.randn((*rows, sum(heads * dim for heads, dim in sizes)), generator=generator)
    parts = torch.split(made, [heads * dim for heads, dim in sizes], -1)
    views = [part.view(*rows, *size) for part, size in zip(parts, sizes, strict=True)]
    return views if shape.strided else [view.contiguous() for view in views]


def _moved(views: list[torch.Tensor], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """To the device, with the strides kept."""
    return [
        torch.empty_strided(one.shape, one.stride(), dtype=dtype, device=device).copy_(one.to(dtype)) for one in views
    ]


def gdn_inputs(shape: Shape, *, ragged: bool) -> _Build:
    """Arguments of `gdn_prefill` or, with all lengths alike, of `gdn_decode`."""

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        rows = _rows(shape, ragged)
        keys, values = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
        q, k, v = _moved(_split(shape, generator, rows, keys, keys, values), device, dtype)
        if not shape.l2norm:  # a sum of corrections along long keys diverges
            k = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
        noise = torch.rand((2, *rows, shape.value_heads), generator=generator)
        g = -shape.decay * 2 * noise[0]
        beta = noise[1] if shape.beta is None else torch.full_like(noise[1], shape.beta)
        state = (shape.value_heads, shape.key_dim, shape.value_dim)
        common = _common(shape, generator, device, *state, dtype=torch.float32)
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "g": g.to(device),
            "beta": beta.to(device, torch.float32 if shape.float32_parameters else dtype),
            **common,
            "scale": shape.scale,
            "qk_l2norm": shape.l2norm,
        }
        return inputs if ragged else _uniform(inputs)

    return build


def conv_inputs(shape: Shape, *, ragged: bool) -> _Build:
    """Arguments of `causal_conv1d_prefill` or, with all lengths alike, of `causal_conv1d_update`."""

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        rows = _rows(shape, ragged)
        parts = _moved(_split(shape, generator, rows, (1, shape.channels), (1, 8)), device, dtype)
        small = torch.float32 if shape.float32_parameters else dtype
        weight = torch.randn((shape.width, shape.channels), generator=generator).to(device, small)
        bias = torch.randn(shape.channels, generator=generator).to(device, small)
        common = _common(shape, generator, device, shape.channels, shape.width - 1, dtype=small)
        inputs = {
            "x": parts[0].squeeze(-2),
            "weight": weight.T if shape.strided else weight.T.contiguous(),
            "bias": bias if shape.with_bias else None,
            **common,
            "activation": shape.activation,
        }
        return inputs if ragged else _uniform(inputs)

    return build


def mamba2_inputs(shape: Shape, *, ragged: bool) -> _Build:
    """Arguments of `mamba2_prefill` or, with all lengths alike, of `selective_state_update`."""

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        rows, num_heads = _rows(shape, ragged), shape.value_heads
        values, keys = (num_heads, shape.value_dim), (shape.key_heads, shape.key_dim)
        z, x, b, c, dt = _moved(_split(shape, generator, rows, values, values, keys, keys, (num_heads, 1)), device, dtype)
        small = torch.float32 if shape.float32_parameters else dtype
        dt = dt.squeeze(-1).to(small) if shape.softplus else dt.squeeze(-1).abs().to(small)
        heads = torch.rand((3, num_heads), generator=generator)
        common = _common(shape, generator, device, num_heads, shape.value_dim, shape.key_dim, dtype=torch.float32)
        inputs = {
            "x": x,
            "dt": dt,
            "a": (-shape.decay * 8 * (heads[0] + 0.1)).to(device),
            "b": b,
            "c": c,
            **common,
            "d": heads[1].to(device, small) if shape.skip else None,
            "z": z if shape.gate else None,
            # Without softplus the step must be positive: a negative one grows the state without bound.
            "dt_bias": (heads[2] - (1.0 if shape.softplus else 0.0)).to(device, small) if shape.with_bias else None,
            "dt_softplus": shape.softplus,
            "dt_limit": shape.limit,
        }
        return inputs if ragged else _uniform(inputs)

    return build


def _rows(shape: Shape, ragged: bool) -> tuple[int, ...]:
    if ragged:
        return (sum(shape.lengths),)
    return (len(shape.lengths), shape.lengths[0] if shape.lengths else 1)


def _uniform(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in ("cu_seqlens", "has_initial_state")}


_ANY: Final = (
    Shape("one token", (1,)),
    Shape("no request", ()),
    Shape("odd sizes", (1, 7), 1, 3, 20, 24, channels=37, width=3),
    Shape("strided", (4, 9), strided=True, index_dtype=torch.int64),
    Shape("grouped heads", (6,), 2, 6, index_dtype=torch.int64),
    Shape("outside", (2, 3, 2, 1), slots=(-1, 6, 5, 2**31 - 1)),
    Shape("all outside", (2, 1), slots=(-1, 4)),
    Shape("plain", (5, 3), l2norm=False, activation=None, with_bias=False, skip=False, gate=False, softplus=False),
    Shape("parameters of x's dtype", (5, 2), float32_parameters=False),
    Shape("strong decay", (9, 4), decay=200.0),
    Shape("no decay", (6,), decay=0.0, beta=1.0),
)
_RAGGED: Final = (
    *_ANY,
    Shape("no token", (0, 0)),
    Shape("empty requests", (0, 5, 0, 2), slots=(3, 0, 5, 1)),
    Shape("fresh states", (3, 0, 70, 2), fresh=(0, 1, 2)),
    Shape("around a chunk", (63, 64, 65), 1, 2),
    Shape("chunks", (150, 1, 33), 1, 2, 32, 16),
    Shape("chunks of strong decay", (140,), 1, 1, decay=30.0),
    Shape("scale, limit", (9, 70), scale=0.7, limit=(0.05, 0.4)),
    Shape("beta 0", (66,), 1, 1, beta=0.0),
    Shape("beta 1", (66,), 1, 1, beta=1.0),
)
_UNIFORM: Final = (
    *(replace(shape, lengths=(1,) * len(shape.lengths)) for shape in _ANY),
    Shape("few tokens", (3, 3, 3, 3), slots=(3, -1, 0, 5)),
    Shape("few strided tokens", (5, 5), strided=True),
    Shape("scale, limit", (2,), scale=0.7, limit=(0.05, 0.4)),
    Shape("beta 0", (2,), beta=0.0),
)
# Heads as hybrid models have them.
_PREFILL_BENCH: Final = (
    Shape("4096 tokens", (4096,), 16, 32, 128, 128, channels=8192, bench=True),
    Shape("8 x 512 tokens", (512,) * 8, 16, 32, 128, 128, channels=8192, bench=True),
)
_MAMBA_BENCH: Final = (
    Shape("4096 tokens", (4096,), 8, 128, 128, 64, bench=True),
    Shape("8 x 512 tokens", (512,) * 8, 8, 128, 128, 64, bench=True),
)
_DECODE_BENCH: Final = (
    Shape("1 request", (1,), 16, 32, 128, 128, channels=8192, bench=True),
    Shape("64 requests", (1,) * 64, 16, 32, 128, 128, channels=8192, bench=True),
)
_UPDATE_BENCH: Final = (
    Shape("1 request", (1,), 8, 128, 128, 64, bench=True),
    Shape("64 requests", (1,) * 64, 8, 128, 128, 64, bench=True),
)
# Sums over a chunk are taken in another order than token by token.
_EXACT: Final = {torch.float32: Tolerance(1e-4, 1e-4)}


def _half(states: float, outputs: float) -> dict[torch.dtype, Tolerance]:
    """For half-precision products on the way to a state, which is float32 all the same; absolute errors of bf16."""
    return {
        torch.float32: Tolerance(2e-2, states),
        torch.bfloat16: Tolerance(2e-2, outputs),
        torch.float16: Tolerance(1e-2, outputs / 2),
    }


def _gdn_tolerance(shape: Shape) -> dict[torch.dtype, Tolerance]:
    scale = shape.key_dim**-0.5 if shape.scale is None else shape.scale
    half = _half(4e-2, scale * (0.024 if shape.l2norm else 0.1))
    # A chunk with more keys than the key has dimensions solves a system of dependent keys, which widens what bf16 rounds away:
    # 13 of 34,560 results at key_dim 13 were off by a fifth more than the bound on an H200; with fp16, none.
    factor = 2 if shape.key_dim < 64 else 1
    return {**half, torch.bfloat16: Tolerance(2e-2, factor * half[torch.bfloat16].absolute)}


def _conv_tolerance(shape: Shape) -> dict[torch.dtype, Tolerance]:
    return _half(1e-5, 2e-2)


def _mamba2_tolerance(shape: Shape) -> dict[torch.dtype, Tolerance]:
    # Each output is a sum over the state's dimension; without decay the state only grows.
    half = _half(8e-2, (0.02 if shape.decay else 0.16) * math.sqrt(shape.key_dim))
    # The scores are rounded too, and bf16 has three bits less than fp16. Of the 33 million results at a model's size, 8 were off by
    # more than twice this on an H200; with fp16, whose bound stays, none.
    factor = 4 if shape.bench else 2
    return {**half, torch.bfloat16: Tolerance(2e-2, factor * half[torch.bfloat16].absolute)}


Kind = tuple[Callable[..., _Build], Callable[[Shape], dict[torch.dtype, Tolerance]]]
"""What makes the inputs of an op, and its tolerances in half precision."""
GDN: Final[Kind] = (gdn_inputs, _gdn_tolerance)
CONV: Final[Kind] = (conv_inputs, _conv_tolerance)
MAMBA2: Final[Kind] = (mamba2_inputs, _mamba2_tolerance)


def cases_of(op: str, shapes: tuple[Shape, ...], kind: Kind, ragged: bool) -> Iterator[Case]:
    """Two cases for each shape: in float32, and in half precision with its tolerances."""
    inputs, half = kind
    for shape in shapes:
        build = inputs(shape, ragged=ragged)
        yield Case(op, shape.label, build, ("out",), _EXACT, shape.bench, ("states",), (torch.float32,))
        label, halves = f"{shape.label}, half precision", (torch.bfloat16, torch.float16)
        yield Case(op, label, build, ("out",), half(shape), shape.bench, ("states",), halves)


CASES: Final = (
    *cases_of(GDN_PREFILL.name, (*_RAGGED, *_PREFILL_BENCH), GDN, True),
    *cases_of(GDN_DECODE.name, (*_UNIFORM, *_DECODE_BENCH), GDN, False),
    *cases_of(CAUSAL_CONV1D_PREFILL.name, (*_RAGGED, *_PREFILL_BENCH), CONV, True),
    *cases_of(CAUSAL_CONV1D_UPDATE.name, (*_UNIFORM, *_DECODE_BENCH), CONV, False),
    *cases_of(MAMBA2_PREFILL.name, (*_RAGGED, *_MAMBA_BENCH), MAMBA2, True),
    *cases_of(SELECTIVE_STATE_UPDATE.name, (*_UNIFORM, *_UPDATE_BENCH), MAMBA2, False),
)
"""Every kernel of the family meets these."""
