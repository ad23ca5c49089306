"""The CPU kernel against the reference and against transformers' rotation."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.ops.rope import apply_rope, cases

DTYPES = list(cases.TOLERANCES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.SHAPES, ids=str)
def test_matches_reference(case: cases.Shape, dtype: torch.dtype) -> None:
    inputs = cases.inputs(case, dtype=dtype)
    before = [inputs[name].clone() for name in ("q", "k")]
    tolerance = cases.TOLERANCES[dtype]
    expected = apply_rope(**inputs, solution="reference")
    for got, want, was in zip(apply_rope(**inputs, solution="cpu"), expected, before, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        assert torch.equal(got[..., case.rotary_dim :], was[..., case.rotary_dim :])
    assert torch.equal(inputs["q"], before[0])
    outs = [torch.full_like(tensor, math.nan) for tensor in before]
    returned = apply_rope(**inputs, q_out=outs[0], k_out=outs[1])
    for got, want, out in zip(outs, expected, returned, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        assert out is got
    apply_rope(**inputs, q_out=inputs["q"], k_out=inputs["k"])
    for got, want in zip((inputs["q"], inputs["k"]), expected, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_matches_transformers() -> None:
    case = cases.Shape("llama", 11, 9, 3, 64, 64, fused=True)
    inputs = cases.inputs(case)
    angles = inputs["cos_sin_cache"][inputs["positions"]]
    cos, sin = (torch.cat((part, part), -1)[None] for part in (angles[:, :32], angles[:, 32:]))
    q, k = apply_rotary_pos_emb(inputs["q"].transpose(0, 1)[None], inputs["k"].transpose(0, 1)[None], cos, sin)
    got = apply_rope(**inputs)
    torch.testing.assert_close(got[0], q[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got[1], k[0].transpose(0, 1), atol=1e-6, rtol=1e-6)


def test_rotation_preserves_relative_positions() -> None:
    case = cases.Shape("pair", 1, 1, 1, 64, 64)
    inputs = cases.inputs(case, dtype=torch.float64)
    dots = []
    for shift in (0, 100, 400):
        rotated = [apply_rope(**{**inputs, "positions": torch.tensor([place + shift])}) for place in (7, 31)]
        dots.append(float((rotated[0][0] * rotated[1][1]).sum()))
    assert dots == pytest.approx([dots[0]] * 3, abs=1e-4)


def test_position_outside_the_table_raises() -> None:
    inputs = cases.inputs(cases.SHAPES[0])
    with pytest.raises(IndexError):
        apply_rope(**{**inputs, "positions": torch.tensor([500])})


def test_bad_operands_are_refused() -> None:
    inputs = cases.inputs(cases.Shape("bad", 5))
    q, k = inputs["q"], inputs["k"]
    for change, message in (
        ({"q": q[0]}, r"q \[num_tokens, num_heads, head_dim\], got \[4, 16\]"),
        ({"k": k[:3]}, r"k \[5, num_kv_heads, 16\]"),
        ({"k": k.half()}, r"float32, got .* float16"),
        ({"positions": inputs["positions"].float()}, "positions .5. int32 or int64"),
        ({"cos_sin_cache": torch.zeros(500, 18)}, "at most 16"),
        ({"cos_sin_cache": torch.zeros(16, 500).t()}, "cos_sin_cache"),
        ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, "pass q.contiguous"),
        ({"q_out": torch.zeros(5, 4, 15)}, "q_out like q"),
        ({"k_out": torch.zeros(5, 2, 16, dtype=torch.float16)}, "k_out like k"),
    ):
        with pytest.raises(ShapeError, match=message):
            apply_rope(**{**inputs, **change})


def test_library_op() -> None:
    import tokenspeed_kernel.ops.rope.api as api

    inputs = cases.inputs(cases.Shape("compiled", 5, fused=True))
    arguments = (inputs["q"], inputs["k"], inputs["positions"], inputs["cos_sin_cache"], False, None)
    assert api.apply_rope is apply_rope
    torch.library.opcheck(torch.ops.tokenspeed.apply_rope.default, arguments)
    exported = torch.export.export(_Rope(), arguments[:4])
    for got, want in zip(exported.module()(*arguments[:4]), apply_rope(*arguments[:4]), strict=True):
        assert torch.equal(got, want)


class _Rope(torch.nn.Module):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return apply_rope(q, k, positions, table)
