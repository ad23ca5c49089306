"""The ops' form in torch.library, and what they say of operands that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernel import NoKernelError, ShapeError
from tokenspeed_kernel.ops import linear_attention
from tokenspeed_kernel.ops.linear_attention.cases import CASES, Shape, conv_inputs, gdn_inputs, mamba2_inputs
from tokenspeed_kernel.registry import collect_builtin

OPS = tuple(dict.fromkeys(case.op for case in CASES))
CPU = torch.device("cpu")
MAKERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "gdn_prefill": (gdn_inputs, True),
    "gdn_decode": (gdn_inputs, False),
    "causal_conv1d_prefill": (conv_inputs, True),
    "causal_conv1d_update": (conv_inputs, False),
    "mamba2_prefill": (mamba2_inputs, True),
    "selective_state_update": (mamba2_inputs, False),
}


def _made(name: str, shape: Shape = Shape("api", (3, 3), 1, 2)) -> dict[str, Any]:  # noqa: B008 - it is frozen
    inputs, ragged = MAKERS[name]
    made: dict[str, Any] = inputs(shape, ragged=ragged)(torch.Generator().manual_seed(1), CPU, torch.float32)
    return made


def _operator(name: str) -> Any:
    return getattr(torch.ops.tokenspeed, name).default


def test_every_op_has_cases() -> None:
    assert set(OPS) == {op for op in collect_builtin().ops() if op.startswith("linear_attention.")}
    assert set(MAKERS) == set(linear_attention.__all__)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "shape",
    [Shape("usual", (3, 3), 1, 2), Shape("none", ()), Shape("strided", (2, 2), strided=True)],
    ids=["usual", "none", "strided"],
)
def test_opcheck(name: str, shape: Shape) -> None:
    made = _made(name, shape)
    schema = _operator(name)._schema
    arguments = [made.get(argument.name) for argument in schema.arguments]
    limits = [list(value) if isinstance(value, tuple) else value for value in arguments]
    torch.library.opcheck(_operator(name), tuple(limits))


@pytest.mark.parametrize("name", MAKERS)
def test_compiled_without_a_graph_break_equals_eager(name: str) -> None:
    function = getattr(linear_attention, name)
    eager, traced = _made(name), _made(name)
    want = function(**eager)
    out = torch.full_like(want, float("nan"))

    def model(**arguments: Any) -> torch.Tensor:
        result: torch.Tensor = function(**arguments, out=out) * 2
        return result

    got = torch.compile(model, fullgraph=True, backend="aot_eager")(**traced)
    assert torch.equal(got, want * 2)
    assert torch.equal(out, want)
    assert torch.equal(traced["states"], eager["states"])


@pytest.mark.parametrize("name", MAKERS)
def test_eager_call_does_not_enter_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the dispatcher was entered")

    module = __import__(getattr(linear_attention, name).__module__, fromlist=["_"])
    for attribute in ("_PREFILL_LIBRARY", "_DECODE_LIBRARY", "_UPDATE_LIBRARY"):
        monkeypatch.setattr(module, attribute, refuse, raising=False)
    getattr(linear_attention, name)(**_made(name))


def test_too_wide_heads_are_refused_with_a_reason() -> None:
    made = _made("gdn_prefill", Shape("wide", (2,), 1, 1, 300, 8))
    with pytest.raises(NoKernelError, match="1 <= key_dim <= 256"):
        linear_attention.gdn_prefill(**made, solution="triton")
    linear_attention.gdn_prefill(**made)


WRONG: tuple[tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]], str], ...] = (
    ("gdn_prefill", "q", lambda m: {"q": m["q"][0]}, r"q \[num_tokens, Hk, key_dim\], got \[1, 16\]"),
    ("gdn_prefill", "k", lambda m: {"k": m["k"][:4]}, r"k like q, \[6, 1, 16\] float32"),
    ("gdn_prefill", "k dtype", lambda m: {"k": m["k"].half()}, r"k like q, .* got \[6, 1, 16\] float16"),
    ("gdn_prefill", "v rows", lambda m: {"v": m["v"][:4]}, r"v with \[6\] rows"),
    ("gdn_prefill", "heads", lambda m: {"q": m["q"].expand(6, 3, 16), "k": m["k"].expand(6, 3, 16)}, "multiple of q's 3 heads"),
    ("gdn_prefill", "g", lambda m: {"g": m["g"][:, :1]}, r"g \[6, 2\]"),
    ("gdn_prefill", "g dtype", lambda m: {"g": m["g"].half()}, r"g \[6, 2\] float32, got \[6, 2\] float16"),
    ("gdn_prefill", "beta", lambda m: {"beta": m["beta"].T}, r"beta \[6, 2\]"),
    ("gdn_prefill", "states", lambda m: {"states": m["states"].mT}, r"states \[num_slots, 2, 16, 16\] float32, last dimension"),
    ("gdn_prefill", "slots", lambda m: {"state_indices": m["state_indices"].float()}, "state_indices .num_reqs. int32 or int64"),
    ("gdn_prefill", "bounds", lambda m: {"cu_seqlens": m["cu_seqlens"].long()}, r"cu_seqlens \[3\] int32, got \[3\] int64"),
    ("gdn_prefill", "known", lambda m: {"has_initial_state": torch.ones(2)}, r"has_initial_state \[2\] bool"),
    ("gdn_prefill", "out", lambda m: {"out": m["v"].half()}, r"out \[6, 2, 16\] float32"),
    ("gdn_decode", "q", lambda m: {"q": m["q"][0]}, r"q \[num_reqs, q_len, Hk, key_dim\]"),
    ("gdn_decode", "slots", lambda m: {"state_indices": m["state_indices"][:1]}, r"state_indices \[2\]"),
    ("causal_conv1d_prefill", "x", lambda m: {"x": m["x"][:, :8]}, r"x \[num_tokens, 40\], as many channels as weight"),
    ("causal_conv1d_prefill", "strides", lambda m: {"x": m["x"].T.contiguous().T}, r"pass x\.contiguous"),
    ("causal_conv1d_prefill", "bias", lambda m: {"bias": m["bias"][:8]}, r"bias \[40\]"),
    ("causal_conv1d_prefill", "states", lambda m: {"states": m["states"][..., :2]}, r"states \[num_slots, 40, 3\]"),
    ("causal_conv1d_prefill", "activation", lambda m: {"activation": "gelu"}, "activation None or \"silu\", got 'gelu'"),
    ("causal_conv1d_update", "x", lambda m: {"x": m["x"][0]}, r"x \[num_reqs, q_len, num_channels\]"),
    ("causal_conv1d_update", "slots", lambda m: {"state_indices": m["state_indices"][:1]}, r"state_indices \[2\]"),
    ("mamba2_prefill", "x", lambda m: {"x": m["x"][0]}, r"x \[num_tokens, H, head_dim\]"),
    ("mamba2_prefill", "dt", lambda m: {"dt": m["dt"][:, :1]}, r"dt \[6, 2\]"),
    ("mamba2_prefill", "a", lambda m: {"a": m["a"][:1]}, r"a \[2\]"),
    ("mamba2_prefill", "a dtype", lambda m: {"a": m["a"].half()}, r"a \[2\] float32, got \[2\] float16"),
    ("mamba2_prefill", "b dtype", lambda m: {"b": m["b"].half()}, r"b \[num_tokens, G, state_dim\] float32"),
    ("mamba2_prefill", "b rows", lambda m: {"b": m["b"][:3]}, r"b with \[6\] rows"),
    ("mamba2_prefill", "z dtype", lambda m: {"z": m["z"].half()}, r"z like x, \[6, 2, 16\] float32"),
    ("mamba2_prefill", "c", lambda m: {"c": m["c"][..., :8]}, r"c like b, \[6, 1, 16\]"),
    ("mamba2_prefill", "z", lambda m: {"z": m["z"][:3]}, r"z like x, \[6, 2, 16\]"),
    ("mamba2_prefill", "d", lambda m: {"d": m["d"][:1]}, r"d \[2\]"),
    ("mamba2_prefill", "limit", lambda m: {"dt_limit": (2.0, 1.0)}, r"lowest <= highest, got \(2\.0, 1\.0\)"),
    ("selective_state_update", "b", lambda m: {"b": m["b"][:, :, 0]}, r"b \[num_reqs, q_len, G, state_dim\]"),
    ("selective_state_update", "bias", lambda m: {"dt_bias": m["dt_bias"][:1]}, r"dt_bias \[2\]"),
)


@pytest.mark.parametrize(("name", "what", "change", "message"), WRONG, ids=[f"{one[0]}-{one[1]}" for one in WRONG])
def test_bad_operands_are_refused(name: str, what: str, change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    made = _made(name)
    before = made["states"].clone()
    with pytest.raises(ShapeError, match=rf"linear_attention\.{name}: (.|\n)*{message}"):
        getattr(linear_attention, name)(**{**made, **change(made)})
    assert torch.equal(made["states"], before)
