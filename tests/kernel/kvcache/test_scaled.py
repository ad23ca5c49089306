"""fp8 keys and values: every number, ranges, round trips, refusals, the library's form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.ops import kvcache
from tokenspeed_kernel.ops.kvcache import cases, quantize_kv, write_kv, write_scaled_kv

FP8 = torch.float8_e4m3fn
ONE = torch.ones([])


@pytest.fixture(params=["cpu", "reference", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Every solution that runs on this machine without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


def _made(**changes: Any) -> dict[str, Any]:
    build = cases.scaled_inputs(cases.Shape("api", 5), by_head=True)
    return {**build(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32), **changes}


def test_every_bf16_number_is_rounded_to_nearest_even(solution: str) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16).view(64, 8, 128)
    kept, _ = quantize_kv(every, every, ONE, ONE, solution=solution)
    # By search: of all fp8 numbers the nearest one, of two equally near ones the even one.
    values = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    positive = values[:127]
    want = every.double().abs().clamp(max=448.0)
    distance = (want.flatten()[:, None] - positive).abs()
    nearest = distance.min(1, keepdim=True).values
    candidates = (distance == nearest) & (nearest == nearest)
    odd = torch.arange(127) % 2 == 1
    alone = candidates.sum(1, keepdim=True) == 1
    code = (candidates & (alone | ~odd)).int().argmax(1)
    got = kept.view(torch.uint8).flatten().int()
    finite = ~every.flatten().isnan()
    assert torch.equal((got & 0x7F)[finite], code[finite].int())
    assert torch.equal((got >> 7)[finite], every.flatten().signbit()[finite].int())
    assert bool(kept.flatten()[~finite].float().isnan().all())


def test_decoding_gives_every_number_back() -> None:
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    import triton
    import triton.language as tl

    from tokenspeed_kernel.ops.kvcache.triton.fp8 import decode_e4m3

    @triton.jit
    def decode(codes_ptr, out_ptr):  # type: ignore[no-untyped-def]
        place = tl.arange(0, 256)
        tl.store(out_ptr + place, decode_e4m3(tl.load(codes_ptr + place)))

    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    globals()["decode_e4m3"] = decode_e4m3
    globals()["tl"] = tl
    decode[(1,)](codes, out)
    assert torch.equal(out.nan_to_num(7.0), codes.view(FP8).float().nan_to_num(7.0))


def test_stored_times_scale_is_the_value(solution: str) -> None:
    made = _made()
    write_scaled_kv(**made, solution=solution)
    page, offset = made["slot_mapping"] // 4, made["slot_mapping"] % 4
    for name in ("k", "v"):
        stored = made[f"{name}_cache"][page, offset].float() * made[f"{name}_scale"][:, None]
        torch.testing.assert_close(stored, made[name], rtol=2**-4, atol=2.0**-10)


def test_beyond_the_range_is_the_largest_number_and_nan_stays(solution: str) -> None:
    x = torch.tensor([1e6, -1e6, math.inf, -math.inf, 448.0, 464.0, math.nan, 0.0]).view(1, 1, 8)
    kept, halved = quantize_kv(x, x, torch.tensor([1.0]), torch.tensor([2.0]), solution=solution)
    assert kept.float().flatten().tolist()[:6] == [448.0, -448.0, 448.0, -448.0, 448.0, 448.0]
    assert halved.float().flatten().tolist()[4:6] == [224.0, 224.0]  # 232 lies between 224 and 240: to even
    assert bool(kept.float()[..., 6].isnan().all())


def test_write_kv_with_scales_is_the_scaled_write() -> None:
    ours, theirs = _made(), _made()
    write_kv(**ours)
    write_scaled_kv(**theirs)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8))


def test_page_beyond_2_31_elements(tmp_path: Any, solution: str) -> None:
    # Report K3, in a sparse file: page 8 lies 2**31 elements behind page 0.
    caches = []
    for name in ("k", "v"):
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(2**31 + 64)
        if path.stat().st_blocks * 512 > 2**20:
            pytest.skip("needs a file system with sparse files")
        storage = torch.from_file(str(path), shared=True, size=2**31 + 64, dtype=torch.uint8).view(FP8)
        caches.append(storage.as_strided((9, 4, 1, 16), (2**28, 16, 16, 1)))
    k, v = torch.randn((2, 1, 1, 16), generator=torch.Generator().manual_seed(0))
    write_scaled_kv(k, v, caches[0], caches[1], torch.tensor([8 * 4 + 3]), ONE, ONE, solution=solution)
    for cache, value in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[8, 3].float(), value[0].to(FP8).float())
        assert int(cache[8, :3].view(torch.uint8).sum()) == 0
        assert int(cache[0].view(torch.uint8).sum()) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {"k": m["k"][0]}, r"k \[num_tokens, num_kv_heads, head_dim\]"),
        (lambda m: {"v": m["v"].half()}, r"v like k, \[5, 2, 16\] float32"),
        (lambda m: {"k_cache": m["k_cache"].float()}, "k_cache float8_e4m3fn, got .*\n.*leave k_scale"),
        (lambda m: {"k_cache": m["k_cache"][..., :8]}, r"k_cache \[num_pages, page_size, 2, 16\]"),
        (lambda m: {"v_cache": m["v_cache"][:3]}, "v_cache like k_cache"),
        (lambda m: {"slot_mapping": m["slot_mapping"].int()}, r"slot_mapping \[5\] int64"),
        (lambda m: {"k_scale": m["k_scale"].double()}, r"k_scale \[\] or \[2\] float32"),
        (lambda m: {"v_scale": torch.ones(3)}, r"v_scale \[\] or \[2\] float32"),
        (lambda m: {"v_scale": ONE}, r"v_scale like k_scale, \[2\]"),
    ],
)
def test_bad_operands_are_refused(change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    made = _made()
    for op in (write_scaled_kv, write_kv):
        with pytest.raises(ShapeError, match=rf"kvcache\.write_scaled_kv: expected {message}"):
            op(**{**made, **change(made)})


def test_half_given_and_missing_scales_are_refused() -> None:
    made = _made()
    with pytest.raises(ShapeError, match="k_scale and v_scale together"):
        write_kv(**{**made, "v_scale": None})
    with pytest.raises(ShapeError, match="k_scale and v_scale with an fp8 cache, got a cache of float8_e4m3fn alone"):
        write_kv(**{**made, "k_scale": None, "v_scale": None})
    k = made["k"]
    with pytest.raises(ShapeError, match=r"k_out \[5, 2, 16\] float8_e4m3fn"):
        quantize_kv(k, k, ONE, ONE, k_out=torch.empty(5, 2, 16))


def test_opcheck() -> None:
    made = _made()
    # PyTorch's schema check compares what was written by arithmetic that fp8 does not have on the CPU.
    others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.tokenspeed.write_scaled_kv.default, (*made.values(), None), test_utils=others)
    arguments = tuple(made[name] for name in ("k", "v", "k_scale", "v_scale"))
    torch.library.opcheck(torch.ops.tokenspeed.quantize_kv.default, (*arguments, None))


def test_compiled_without_a_graph_break_equals_eager() -> None:
    def model(made: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        write_kv(**made)
        return quantize_kv(made["k"] * 2, made["v"], made["k_scale"], made["v_scale"])

    eager, traced = _made(), _made()
    want, got = model(eager), torch.compile(model, fullgraph=True, backend="aot_eager")(traced)
    for one, other in (*zip(want, got, strict=True), *((eager[name], traced[name]) for name in ("k_cache", "v_cache"))):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_eager_call_does_not_enter_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the dispatcher was entered")

    for name in ("_WRITE_LIBRARY", "_QUANTIZE_LIBRARY"):
        monkeypatch.setattr(kvcache.scaled, name, refuse)
    made = _made()
    write_scaled_kv(**made)
    quantize_kv(made["k"], made["v"], ONE, ONE)
