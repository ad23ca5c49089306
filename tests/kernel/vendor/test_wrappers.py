"""Each wrapper meets the cases of its op: what it passes to the library, and what it makes of the answer."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.errors import NoKernelError, ShapeError
from tokenspeed_kernel.ops.attention import mha_decode, mha_extend, mha_prefill, plan
from tokenspeed_kernel.ops.gemm import grouped_mm_contiguous
from tokenspeed_kernel.ops.mla import mla_decode
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import Registry, collect_builtin
from tokenspeed_kernel.testing import check_case, family_cases

CPU = torch.device("cpu")
SOLUTIONS = ("flashinfer", "flash_mla", "deep_gemm", "trtllm", "cudnn")
SPECS = [spec for spec in collect_builtin() if spec.solution in SOLUTIONS]
pytestmark = pytest.mark.usefixtures("vendor_registry")


def _cases(op: str) -> list[Case]:
    return [case for case in family_cases(op.partition(".")[0]) if case.op == op and not case.bench]


def test_each_library_has_kernels() -> None:
    assert Counter(spec.solution for spec in SPECS) == {"flashinfer": 7, "flash_mla": 1, "deep_gemm": 3, "trtllm": 1, "cudnn": 1}
    assert {spec.name for spec in SPECS if not spec.verified} == {"trtllm_mm_sm90"}
    assert all(bool(spec.requires) is (spec.solution != "cudnn") for spec in SPECS), "PyTorch brings cuDNN"
    assert not any(spec.capability.interpreter for spec in SPECS)


@pytest.mark.parametrize("kernel", [spec.name for spec in SPECS])
def test_cases(kernel: str, vendor_registry: Registry) -> None:
    torch.set_num_threads(1)
    spec = next(one for one in SPECS if one.name == kernel)
    ran = []
    for case in _cases(spec.op):
        for dtype in (torch.bfloat16, torch.float16):
            if not case.takes(dtype):
                continue
            try:
                check_case(case, solution=kernel, device=CPU, dtype=dtype)
            except NoKernelError:
                continue
            ran.append(case.label)
    assert ran, f"no case of {spec.op} fits {kernel}"


def _paged(
    *lengths: int, page_size: int = 4, num_heads: int = 4, num_kv_heads: int = 2, dim: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """k_cache, v_cache, page_table, seq_lens with NaN where no key is."""
    generator = torch.Generator().manual_seed(1)
    pages = max(1, -(-max(lengths) // page_size))
    table = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages).to(torch.int32)
    k, v = (torch.randn(len(lengths) * pages, page_size, num_kv_heads, dim, generator=generator).bfloat16() for _ in range(2))
    return k, v, table, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("missing", [((0, 0),), ((0, 2), (1, 0), (2, 0)), ((1, 1), (0, 1)), ((2, 0), (2, 1), (2, 2))])
@pytest.mark.parametrize("causal", [True, False])
def test_missing_pages_are_ignored_wherever_they_are(missing: tuple[tuple[int, int], ...], causal: bool) -> None:
    k, v, table, lens = _paged(11, 5, 9)
    for index, (row, page) in enumerate(missing):
        table[row, page] = (-1, 99, 10**9)[index % 3]
    starts = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    q = torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    call = {"max_seqlen_q": 4, "max_seqlen_k": 11, "causal": causal}
    want = mha_extend(q, k, v, table, starts, lens, **call, solution="reference")
    got = mha_extend(q, k, v, table, starts, lens, **call, solution="flashinfer")
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)
    want = mha_decode(q[:3], k, v, table, lens, max_seqlen_k=11, solution="reference")
    got = mha_decode(q[:3], k, v, table, lens, max_seqlen_k=11, solution="flashinfer")
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("solution", ["flashinfer", "flash_mla"])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_latent_rows_with_missing_pages(solution: str, q_len: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(9, 64, 576, generator=generator).bfloat16()
    table = torch.tensor([[3, -1, 5], [8, 2, 1], [-1, -1, 0], [4, 6, 99]], dtype=torch.int32)
    lens = torch.tensor([190, 2, 100, 129], dtype=torch.int32)  # of the second, fewer than the queries; of the third, none is there
    q = torch.randn(4, q_len, 8, 576, generator=generator).bfloat16()
    call = {"max_seqlen_k": 192, "softmax_scale": 0.1, "causal": causal, "return_lse": True}
    want = mla_decode(q, cache, table, lens, **call, solution="reference")
    got = mla_decode(q, cache, table, lens, **call, solution=solution)
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)
    assert got[1][2].eq(-math.inf).all()
    assert got[0][2].eq(0).all()


def test_queries_before_the_first_key() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(size, 2, 64, generator=generator).half() for size in (9, 6, 6))
    starts, key_starts = (torch.tensor(one, dtype=torch.int32) for one in ([0, 4, 4, 9], [0, 2, 6, 6]))
    for causal in (True, False):
        for solution, return_lse in (("flashinfer", False), ("cudnn", True)):
            call = {"max_seqlen_q": 5, "max_seqlen_k": 4, "causal": causal, "return_lse": return_lse}
            want = mha_prefill(q, k, v, starts, key_starts, **call, solution="reference")
            got = mha_prefill(q, k, v, starts, key_starts, **call, solution=solution)
            torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)


def test_one_plan_serves_all_layers_and_different_options() -> None:
    k, v, table, lens = _paged(11, 5, 9)
    shared = plan(table, lens, page_size=4, max_seqlen_k=11)
    for layer in range(3):
        q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(layer)).bfloat16()
        for scale in (None, 0.3):
            call = {"max_seqlen_k": 11, "softmax_scale": scale, "logit_cap": 5.0 if layer else None}
            want = mha_decode(q, k, v, table, lens, **call, solution="reference")
            got = mha_decode(q, k, v, table, lens, **call, plan=shared, solution="flashinfer")
            torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)


def test_caches_that_lie_differently_are_refused() -> None:
    k, v, table, lens = _paged(11, 5, 9)
    wide = torch.zeros(*v.shape[:2], 3, 64, dtype=v.dtype)
    wide[:, :, :2] = v
    q = torch.randn(3, 4, 64).bfloat16()
    with pytest.raises(ShapeError, match="k_cache and v_cache with the same strides"):
        mha_decode(q, k, wide[:, :, :2], table, lens, max_seqlen_k=11, solution="flashinfer")


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_grouped_rows_in_any_order(integer: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)

    x = QuantizedTensor(fp8(300, 200), "fp8_e4m3@block_1x128", (300, 200), torch.rand(300, 2, generator=generator) + 0.5)
    weight = QuantizedTensor(fp8(5, 72, 200), "fp8_e4m3@block_128x128", (5, 72, 200), torch.rand(5, 1, 2, generator=generator))
    experts = torch.randint(-2, 7, (300,), generator=generator).to(integer)
    want = grouped_mm_contiguous(x, weight, expert_ids=experts, out_dtype=torch.bfloat16, solution="reference")
    got = grouped_mm_contiguous(x, weight, expert_ids=experts, out_dtype=torch.bfloat16, solution="deep_gemm")
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-1)
    assert got[(experts < 0) | (experts > 4)].eq(0).all()
