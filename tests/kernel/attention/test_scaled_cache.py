"""Attention to fp8 caches: what was written with scales is read with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel import NoKernelError, ShapeError
from tokenspeed_kernel.ops.attention import mha_decode, mha_decode_scaled, mha_extend, mha_extend_scaled
from tokenspeed_kernel.ops.attention.scaled_cases import SCALED_CASES
from tokenspeed_kernel.ops.kvcache import write_kv
from tokenspeed_kernel.testing import check_case

FP8 = torch.float8_e4m3fn
CASES = [case for case in SCALED_CASES if not case.bench]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _made(dtype: torch.dtype, device: str, *, by_head: bool, head_dim: int = 32, page_size: int = 8) -> dict[str, Any]:
    """Three requests of 5, 40 and 0 tokens; pages that belong to nobody hold NaN."""
    generator = torch.Generator().manual_seed(4)
    pages, heads, lengths = 16, 2, (5, 40, 0)
    table = torch.full((3, 6), -1, dtype=torch.int32)
    order = torch.randperm(pages, generator=generator)
    caches = [torch.full((pages, page_size, heads, head_dim), 0x7F, dtype=torch.uint8).view(FP8).to(device) for _ in range(2)]
    scales = torch.rand((2, heads), generator=generator) * 0.02 + 0.005
    scales = scales.to(device) if by_head else scales[:, 0].to(device)
    used = 0
    for request, length in enumerate(lengths):
        count = -(-length // page_size)
        table[request, :count] = order[used : used + count]
        used += count
        slots = torch.tensor([int(table[request, token // page_size]) * page_size + token % page_size for token in range(length)])
        k, v = torch.randn((2, length, heads, head_dim), generator=generator).to(device, dtype)
        write_kv(k, v, *caches, slots.to(device, torch.int64), k_scale=scales[0], v_scale=scales[1])
    q = torch.randn((3, 6, head_dim), generator=generator).to(device, dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32).to(device)
    return {"q": q, "caches": caches, "table": table.to(device), "seq_lens": seq_lens, "scales": scales}


def _check(dtype: torch.dtype, device: str, solution: str, *, by_head: bool, **sizes: int) -> None:
    made = _made(dtype, device, by_head=by_head, **sizes)
    wide = [
        cache.float() * (scale if scale.dim() == 0 else scale[:, None])
        for cache, scale in zip(made["caches"], made["scales"], strict=True)
    ]
    q, table, seq_lens, scales = made["q"], made["table"], made["seq_lens"], made["scales"]
    options: dict[str, Any] = {"max_seqlen_k": 40, "return_lse": True}
    tolerance = TOLERANCE[dtype]
    want = mha_decode(q.float(), *wide, table, seq_lens, **options, solution="reference")
    got = mha_decode_scaled(q, *made["caches"], table, seq_lens, *scales, **options, solution=solution)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)
    assert not bool(got[0][2].any())
    starts = torch.tensor([0, 2, 3, 3], dtype=torch.int32).to(device)
    options |= {"max_seqlen_q": 2, "sliding_window": 9}
    want = mha_extend(q.float(), *wide, table, starts, seq_lens, **options, solution="reference")
    got = mha_extend_scaled(q, *made["caches"], table, starts, seq_lens, *scales, **options, solution=solution)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("solution", ["reference", "cpu"])
def test_on_cpu(solution: str, dtype: torch.dtype, by_head: bool) -> None:
    _check(dtype, "cpu", solution, by_head=by_head)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_every_case_on_cpu(index: int) -> None:
    # The dtypes take turns; `tokenspeed-kernel verify` runs each case in all of them.
    check_case(CASES[index], solution="cpu", device=torch.device("cpu"), dtype=list(TOLERANCE)[index // 2 % 3])


def test_scales_are_not_rounded_to_the_dtype_of_the_queries() -> None:
    """A scale between two bf16 numbers: rounded first, it would be off by half a unit in the last place of bf16."""
    made = _made(torch.bfloat16, "cpu", by_head=False)
    scales = [torch.tensor(1.00390624), torch.tensor(1.00390624)]
    q, table, seq_lens = made["q"], made["table"], made["seq_lens"]
    got = mha_decode_scaled(q, *made["caches"], table, seq_lens, *scales, max_seqlen_k=40, return_lse=True)
    wide = [cache.double() * 1.00390624 for cache in made["caches"]]
    scaled = (q.float() * 1.00390624).to(torch.bfloat16).double() / 1.00390624
    want = mha_decode(scaled, *wide, table, seq_lens, max_seqlen_k=40, return_lse=True, solution="reference")
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton_interpreted(dtype: torch.dtype, by_head: bool) -> None:
    pytest.importorskip("triton", reason="needs triton")
    _check(dtype, "cpu", "triton", by_head=by_head)


@pytest.mark.gpu
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("head_dim", "page_size"), [(32, 8), (64, 16), (128, 64)])
def test_triton_on_gpu(dtype: torch.dtype, by_head: bool, head_dim: int, page_size: int) -> None:
    _check(dtype, "cuda", "triton", by_head=by_head, head_dim=head_dim, page_size=page_size)


def test_out_is_written_and_compiles() -> None:
    made = _made(torch.float32, "cpu", by_head=True)
    arguments = (made["q"], *made["caches"], made["table"], made["seq_lens"], *made["scales"])
    want = mha_decode_scaled(*arguments, max_seqlen_k=40)
    out = torch.full_like(made["q"], float("nan"))
    assert mha_decode_scaled(*arguments, max_seqlen_k=40, out=out) is out
    assert torch.equal(out, want)  # type: ignore[arg-type]

    def model(*given: torch.Tensor) -> Any:
        return mha_decode_scaled(*given, max_seqlen_k=40)

    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(*arguments), want)  # type: ignore[arg-type]


def test_refusals() -> None:
    made = _made(torch.float32, "cpu", by_head=True)
    q, caches, table, lengths, scales = (made[name] for name in ("q", "caches", "table", "seq_lens", "scales"))
    with pytest.raises(ShapeError, match=r"attention\.mha_decode_scaled: expected k_cache float8_e4m3fn, got float32"):
        mha_decode_scaled(q, caches[0].float(), caches[1], table, lengths, *scales, max_seqlen_k=40)
    with pytest.raises(ShapeError, match=r"v_scale \[\] or \[2\] float32 on cpu, got \[3\] float32"):
        mha_decode_scaled(q, *caches, table, lengths, scales[0], torch.ones(3), max_seqlen_k=40)
    with pytest.raises(ShapeError, match="a number of heads that divides 5"):
        mha_decode_scaled(q[:, :5], *caches, table, lengths, *scales, max_seqlen_k=40)
    e5m2 = [cache.view(torch.float8_e5m2) for cache in caches]
    with pytest.raises(NoKernelError):
        mha_decode(q, *e5m2, table, lengths, max_seqlen_k=40)
