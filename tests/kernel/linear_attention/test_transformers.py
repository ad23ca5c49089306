"""Independent truth: the same mathematics as transformers writes it in PyTorch, for models with these layers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from tokenspeed_kernel.ops.linear_attention import (
    causal_conv1d_prefill,
    causal_conv1d_update,
    gdn_decode,
    gdn_prefill,
    mamba2_prefill,
    selective_state_update,
)

SOLUTIONS = ("reference", "cpu")


def _plain(module: object, *names: str) -> object:
    """The function in PyTorch, whatever kernel libraries are installed beside it."""
    found = next(getattr(module, name) for name in names if hasattr(module, name))
    return getattr(found, "__wrapped__", found)


CHUNK_RULE = _plain(modeling_qwen3_next, "torch_chunk_gated_delta_rule")
TOKEN_RULE = _plain(modeling_qwen3_next, "torch_recurrent_gated_delta_rule")
CONVOLVE = _plain(modeling_qwen3_next, "causal_conv1d_fn")
CONVOLVE_NEXT = _plain(modeling_qwen3_next, "causal_conv1d_update", "torch_causal_conv1d_update")
CHUNK_SCAN = _plain(modeling_mamba2, "mamba2_chunk_scan")
STATE_UPDATE = _plain(modeling_mamba2, "mamba2_selective_state_update")


def _rule_inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = normal(batch, length, 2, 32), normal(batch, length, 2, 32), normal(batch, length, 4, 24)
    g = -torch.nn.functional.softplus(normal(batch, length, 4))
    return {"q": q, "k": k, "v": v, "g": g, "beta": normal(batch, length, 4).sigmoid(), "state": normal(batch, 4, 32, 24)}


@pytest.mark.parametrize("solution", SOLUTIONS)
@pytest.mark.parametrize("rule", [CHUNK_RULE, TOKEN_RULE], ids=["chunks", "tokens"])
def test_gated_delta_rule(rule, solution: str) -> None:  # type: ignore[no-untyped-def]
    batch, length = 2, 100
    made = _rule_inputs(batch, length)
    operands = [made[name] for name in ("q", "k", "v", "g", "beta")]
    want, want_state = rule(*operands, initial_state=made["state"], output_final_state=True, use_qk_l2norm_in_kernel=True)
    states, slots, bounds = made["state"].clone(), torch.tensor([0, 1]), torch.tensor([0, 100, 200], dtype=torch.int32)
    got = gdn_prefill(*(one.flatten(0, 1) for one in operands), states, slots, bounds, qk_l2norm=True, solution=solution)
    torch.testing.assert_close(got, want.flatten(0, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, want_state, rtol=1e-4, atol=1e-5)
    states = made["state"].clone()
    short = [one[:, :3] for one in operands]
    want, want_state = rule(*short, initial_state=made["state"], output_final_state=True, use_qk_l2norm_in_kernel=True)
    got = gdn_decode(*short, states, slots, qk_l2norm=True, solution=solution)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, want_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_causal_convolution(solution: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 12, 9), (12, 4), (12,)))
    states = torch.full((2, 12, 3), math.nan)
    slots, bounds = torch.tensor([1, 0]), torch.tensor([0, 7, 14], dtype=torch.int32)
    first, rest = x[..., :7], x[..., 7:]
    want = CONVOLVE(first, weight, bias, "silu").transpose(1, 2)  # type: ignore[operator]
    tokens = first.transpose(1, 2).reshape(14, 12).contiguous()
    fresh = torch.zeros(2, dtype=torch.bool)
    got = causal_conv1d_prefill(
        tokens, weight, bias, states, slots, bounds, has_initial_state=fresh, activation="silu", solution=solution
    )
    torch.testing.assert_close(got.view(2, 7, 12), want, rtol=1e-5, atol=1e-5)
    theirs = first[..., -3:].contiguous()
    assert torch.equal(states[slots], theirs)
    want = CONVOLVE_NEXT(rest, theirs, weight, bias, "silu").transpose(1, 2)  # type: ignore[operator]
    tokens = rest.transpose(1, 2).contiguous()
    got = causal_conv1d_update(tokens, weight, bias, states, slots, activation="silu", solution=solution)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(states[slots], theirs)


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_selective_state_space(solution: str) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = {"x": (2, 80, 6, 16), "dt": (2, 80, 6), "b": (2, 80, 2, 24), "c": (2, 80, 2, 24), "state": (2, 6, 16, 24)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    a, d, dt_bias = -torch.rand(6, generator=generator) * 2, torch.rand(6, generator=generator), torch.randn(6, generator=generator)
    limit = (0.01, 1.5)
    options = {"D": d, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": limit, "return_final_states": True}
    operands = (made["x"], made["dt"], a, made["b"], made["c"])
    want, want_state = CHUNK_SCAN(*operands, 32, initial_states=made["state"], **options)  # type: ignore[operator]
    states, slots, bounds = made["state"].clone(), torch.tensor([0, 1]), torch.tensor([0, 80, 160], dtype=torch.int32)
    x, dt, b, c = (made[name].flatten(0, 1) for name in ("x", "dt", "b", "c"))
    ours = {"d": d, "dt_bias": dt_bias, "dt_softplus": True}
    got = mamba2_prefill(x, dt, a, b, c, states, slots, bounds, dt_limit=limit, **ours, solution=solution)
    torch.testing.assert_close(got, want.flatten(0, 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, want_state, rtol=1e-4, atol=1e-4)

    z = torch.randn((2, 6, 16), generator=generator)
    x, dt, b, c = (made[name][:, 0] for name in ("x", "dt", "b", "c"))
    theirs = made["state"].clone()
    # Its step, a, d and bias are spread over a head's elements.
    wide = {"D": d[:, None].expand(6, 16), "dt_bias": dt_bias[:, None].expand(6, 16), "dt_softplus": True, "z": z}
    want = STATE_UPDATE(  # type: ignore[operator]
        theirs, x, dt[..., None].expand(2, 6, 16), a[:, None, None].expand(6, 16, 24), b, c, **wide
    )
    states = made["state"].clone()
    x, dt, b, c, z = (one[:, None] for one in (x, dt, b, c, z))
    got = selective_state_update(x, dt, a, b, c, states, slots, z=z, **ours, solution=solution)
    torch.testing.assert_close(got[:, 0], want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, theirs, rtol=1e-4, atol=1e-4)
