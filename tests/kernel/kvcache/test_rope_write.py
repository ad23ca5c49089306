"""Rotation with the cache write: what the two ops do one after the other, layouts, far pages, refusals, the library's form."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.ops.kvcache import rope_write_kv, write_kv
from tokenspeed_kernel.ops.kvcache.rope_write_cases import RopeWrite, random_rope_write
from tokenspeed_kernel.ops.rope import apply_rope
from tokenspeed_kernel.testing import check_case

FP8 = torch.float8_e4m3fn
LAYOUTS = [
    RopeWrite("plain", 9, 9, 3, 64, 64, 3, 16, pooled=True),
    RopeWrite("partial interleaved", 5, 3, 3, 24, 12, interleaved=True),
    RopeWrite("fp8", 9, 9, 3, 64, 64, 3, 16, scales="tensor"),
    RopeWrite("fp8 by head, partial, outside", 6, rotary_dim=6, scales="head", slots=(-1, 24, 3, 2**40, -(2**62), 23)),
    RopeWrite("fp8 interleaved", 5, scales="head", interleaved=True),
]


@pytest.fixture(params=["cpu", "reference", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Every solution that runs on this machine without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


def _made(shape: RopeWrite = LAYOUTS[0], dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> dict[str, Any]:
    return {**shape.inputs(torch.Generator().manual_seed(0), torch.device(device), dtype), **changes}


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _skip_unless_hopper(solution: str) -> None:
    """Kernels for Hopper run on Hopper."""
    if solution == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def _portable(solution: str) -> str:
    """The solution that the two ops have."""
    return "triton" if solution == "hopper" else solution


def _check_against_two_ops(shape: RopeWrite, dtype: torch.dtype, device: str, solution: str) -> None:
    one, two = _made(shape, dtype, device), _made(shape, dtype, device)
    kept = one["k"].clone(), one["v"].clone()
    got = rope_write_kv(**one, solution=solution)
    options = {"interleaved": shape.interleaved, "solution": _portable(solution)}
    want, key = apply_rope(two["q"], two["k"], two["positions"], two["cos_sin_cache"], **options)
    scales = {name: two[name] for name in ("k_scale", "v_scale") if name in two}
    write_kv(key, two["v"], two["k_cache"], two["v_cache"], two["slot_mapping"], **scales, solution=_portable(solution))
    assert torch.equal(_bytes(got), _bytes(want))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(_bytes(one[name]), _bytes(two[name])), name
    assert torch.equal(one["k"], kept[0])
    assert torch.equal(one["v"], kept[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda shape: str(shape.name))
def test_it_is_what_the_two_ops_do(shape: RopeWrite, dtype: torch.dtype, solution: str) -> None:
    _check_against_two_ops(shape, dtype, "cpu", solution)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_form_for_hopper_is_what_the_two_ops_do() -> None:
    pytest.importorskip("triton", reason="needs triton")
    _check_against_two_ops(LAYOUTS[2], torch.float32, "cpu", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("solution", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [*LAYOUTS, RopeWrite("large", 1000, 32, 8, 128, 128, 128, 16, scales="tensor")], ids=lambda shape: str(shape.name)
)
def test_it_is_what_the_two_ops_do_on_gpu(shape: RopeWrite, dtype: torch.dtype, solution: str) -> None:
    _skip_unless_hopper(solution)
    _check_against_two_ops(shape, dtype, "cuda", solution)


@pytest.mark.parametrize("index", range(3))
def test_random_shapes(index: int, solution: str) -> None:
    case = random_rope_write(random.Random(index))
    check_case(case, solution=solution, device=torch.device("cpu"), dtype=torch.float32)


def test_fp8_numbers_are_at_most_one_step_from_the_reference_and_seldom_that(solution: str) -> None:
    shape = RopeWrite("steps", 40, 2, 4, 32, 32, 3, 16, scales="head")
    got, want = _made(shape), _made(shape)
    rope_write_kv(**got, solution=solution)
    rope_write_kv(**want, solution="reference")
    for name in ("k_cache", "v_cache"):
        steps = (_bytes(got[name]).int() - _bytes(want[name]).int()).abs()
        assert int(steps.max()) <= 1
        assert float((steps > 0).float().mean()) < 0.002, name


def test_queries_in_place(solution: str) -> None:
    made, other = _made(), _made()
    want = rope_write_kv(**other, solution=solution)
    assert rope_write_kv(**made, q_out=made["q"], solution=solution) is made["q"]
    torch.testing.assert_close(made["q"], want)
    assert torch.equal(made["k_cache"], other["k_cache"])


def test_nothing_but_the_named_slots_is_written(solution: str) -> None:
    made = _made(LAYOUTS[3])
    before = {name: _bytes(made[name]).clone() for name in ("k_cache", "v_cache")}
    rope_write_kv(**made, solution=solution)
    kept = [slot for slot in range(24) if slot not in (3, 23)]
    for name, old in before.items():
        now = _bytes(made[name])
        assert torch.equal(now.flatten(0, 1)[kept], old.flatten(0, 1)[kept])
        assert not torch.equal(now, old)


def test_positions_as_int32_and_strided_lists(solution: str) -> None:
    made, other = _made(), _made()
    twice = torch.stack((made["slot_mapping"], made["slot_mapping"].flip(0)), 1)
    want = rope_write_kv(**other, solution=solution)
    got = rope_write_kv(**{**made, "positions": made["positions"].int(), "slot_mapping": twice[:, 0]}, solution=solution)
    assert torch.equal(got, want)
    assert torch.equal(made["v_cache"], other["v_cache"])


def test_a_position_without_an_angle() -> None:
    made = _made(positions=torch.full((9,), 500))
    with pytest.raises(IndexError):
        rope_write_kv(**made, solution="cpu")
    if not torch.cuda.is_available():
        pytest.importorskip("triton", reason="needs triton")
        assert bool(rope_write_kv(**made, solution="triton").isnan().all())


def test_page_beyond_2_31_elements(tmp_path: Path) -> None:
    # In a sparse file: page 8 lies 2**31 elements behind page 0.
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    page_elements, caches = 2**28, []
    for name in ("k", "v"):
        storage = torch.from_file(str(tmp_path / name), shared=True, size=8 * page_elements + 64, dtype=torch.float32)
        caches.append(storage.as_strided((9, 4, 1, 16), (page_elements, 16, 16, 1)))
    made = _made(RopeWrite("far", 1, 2, 1), k_cache=caches[0], v_cache=caches[1], slot_mapping=torch.tensor([8 * 4 + 3]))
    rope_write_kv(**made, solution="triton")
    _, key = apply_rope(made["q"], made["k"], made["positions"], made["cos_sin_cache"], solution="cpu")
    torch.testing.assert_close(caches[0][8, 3], key[0])
    assert torch.equal(caches[1][8, 3], made["v"][0])
    assert float(caches[0][0].abs().sum()) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: {"q": made["q"][0]}, r"expected q \[num_tokens, num_heads, head_dim\]"),
        (lambda made: {"k": made["k"].double()}, r"k \[9, num_kv_heads, 64\] float32.*got.*float64"),
        (lambda made: {"v": made["v"][:, :1]}, r"v like k, \[9, 3, 64\]"),
        (lambda made: {"positions": made["positions"].float()}, r"positions \[9\] int32 or int64"),
        (lambda made: {"cos_sin_cache": made["cos_sin_cache"].repeat(1, 2)}, "rotary_dim even and at most 64"),
        (lambda made: {"cos_sin_cache": made["cos_sin_cache"].t().contiguous().t()}, "cos_sin_cache contiguous"),
        (lambda made: {"k_cache": made["k_cache"].to(FP8), "v_cache": made["v_cache"].to(FP8)}, "pass k_scale and v_scale"),
        (lambda made: {"k_cache": made["k_cache"].half()}, r"k_cache \[num_pages, page_size, 3, 64\] float32"),
        (lambda made: {"v_cache": made["v_cache"][:2]}, r"v_cache \[num_pages, page_size, 3, 64\] float32"),
        (lambda made: {"k_scale": torch.ones([])}, "k_scale and v_scale together"),
        (lambda made: {"k_scale": torch.ones([]), "v_scale": torch.ones([])}, "float8_e4m3fn"),
        (lambda made: {"slot_mapping": made["slot_mapping"].int()}, r"slot_mapping \[9\] int64"),
        (lambda made: {"q_out": made["q"].half()}, "q_out like q"),
    ],
)  # fmt: skip
def test_bad_operands_are_refused(change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    made = _made()
    with pytest.raises(ShapeError, match=f"(?s)kvcache.rope_write_kv.*{message}"):
        rope_write_kv(**{**made, **change(made)})


def test_scales_of_another_shape_are_refused() -> None:
    made = _made(LAYOUTS[2])
    for change in ({"k_scale": torch.ones(2)}, {"v_scale": torch.ones(3)}, {"k_scale": torch.ones([], dtype=torch.float64)}):
        with pytest.raises(ShapeError, match="_scale"):
            rope_write_kv(**{**made, **change})


@pytest.mark.parametrize("shape", [LAYOUTS[0], LAYOUTS[2]], ids=lambda shape: str(shape.name))
def test_library_op(shape: RopeWrite) -> None:
    made = _made(replace(shape, pooled=False))
    names = ("q", "k", "v", "positions", "cos_sin_cache", "k_cache", "v_cache", "slot_mapping", "interleaved", "k_scale", "v_scale")
    # fp8 is left out of the tests that compare mutated tensors, which PyTorch cannot do for it.
    checks = ("test_schema", "test_faketensor") if not shape.scales else ("test_faketensor",)
    torch.library.opcheck(
        torch.ops.tokenspeed.rope_write_kv.default, (*(made.get(name) for name in names), None), test_utils=checks
    )


@pytest.mark.gpu
def test_chained_launches_see_what_the_ones_before_them_wrote() -> None:
    """Each launch of a graph rotates what the one before it wrote, in place: one that began too early would rotate old numbers."""
    _skip_unless_hopper("hopper")
    made = _made(RopeWrite("chain", 64, 32, 8, 128, 128, 16, 16), torch.float32, "cuda")
    want = made["q"].clone()
    for _ in range(8):
        want = apply_rope(want, made["k"], made["positions"], made["cos_sin_cache"], solution="triton")[0]
    start, q = made["q"].clone(), made["q"]
    call = lambda: rope_write_kv(**made, q_out=q, solution="hopper")  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    for _ in range(5):
        q.copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(q, want)
