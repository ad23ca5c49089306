"""Rotation with the write of latent rows: what the two ops do one after the other, refusals, the library's form."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.ops.mla import rope_write_mla, write_mla_cache
from tokenspeed_kernel.ops.mla.rope_write_cases import RopeWrite, random_rope_write
from tokenspeed_kernel.ops.rope import apply_rope
from tokenspeed_kernel.testing import check_case

LAYOUTS = [
    RopeWrite("512 + 64", 5, 16, 512, 64, 2, 16, interleaved=True),
    RopeWrite("odd sizes, strided", 9, 3, 37, 6, 3, 5, strided=True),
    RopeWrite("outside", 6, slots=(-1, 24, 3, 2**40, -(2**62), 23)),
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


@pytest.mark.parametrize("index", range(3))
def test_random_shapes(index: int, solution: str) -> None:
    check_case(random_rope_write(random.Random(index)), solution=solution, device=torch.device("cpu"), dtype=torch.float32)


def _check_against_two_ops(shape: RopeWrite, dtype: torch.dtype, device: str, solution: str) -> None:
    one, two = _made(shape, dtype, device), _made(shape, dtype, device)
    kept, other = one["k_rope"].clone(), "triton" if solution == "hopper" else solution
    got = rope_write_mla(**one, solution=solution)
    options = {"interleaved": shape.interleaved, "solution": other}
    want, key = apply_rope(two["q_rope"], two["k_rope"][:, None], two["positions"], two["cos_sin_cache"], **options)
    write_mla_cache(two["latent"], key[:, 0], two["kv_cache"], two["slot_mapping"], solution=other)
    assert torch.equal(got, want)
    assert torch.equal(one["kv_cache"], two["kv_cache"])
    assert torch.equal(one["k_rope"], kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda shape: str(shape.name))
def test_it_is_what_the_two_ops_do(shape: RopeWrite, dtype: torch.dtype, solution: str) -> None:
    _check_against_two_ops(shape, dtype, "cpu", solution)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_form_for_hopper_is_what_the_two_ops_do() -> None:
    pytest.importorskip("triton", reason="needs triton")
    _check_against_two_ops(LAYOUTS[1], torch.float32, "cpu", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("solution", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*LAYOUTS, RopeWrite("large", 1000, 128, 512, 64, 64, 64)], ids=lambda shape: str(shape.name))
def test_it_is_what_the_two_ops_do_on_gpu(shape: RopeWrite, dtype: torch.dtype, solution: str) -> None:
    if solution == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    _check_against_two_ops(shape, dtype, "cuda", solution)


def test_queries_in_place(solution: str) -> None:
    made, other = _made(), _made()
    want = rope_write_mla(**other, solution=solution)
    assert rope_write_mla(**made, q_out=made["q_rope"], solution=solution) is made["q_rope"]
    torch.testing.assert_close(made["q_rope"], want)
    assert torch.equal(made["kv_cache"], other["kv_cache"])


def test_row_beyond_2_31_elements(tmp_path: Path) -> None:
    # In a sparse file: page 8 lies 2**31 elements behind page 0.
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    page_elements = 2**28
    storage = torch.from_file(str(tmp_path / "kv"), shared=True, size=8 * page_elements + 256, dtype=torch.float32)
    cache = storage.as_strided((9, 4, 40), (page_elements, 40, 1))
    made = _made(RopeWrite("far", 1), kv_cache=cache, slot_mapping=torch.tensor([8 * 4 + 3]))
    rope_write_mla(**made, solution="triton")
    assert torch.equal(cache[8, 3, :32], made["latent"][0])
    assert float(cache[0].abs().sum()) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: {"q_rope": made["q_rope"][0]}, r"q_rope \[num_tokens, num_heads, rope_dim\]"),
        (lambda made: {"k_rope": made["k_rope"][:, :32]}, r"k_rope \[5, 64\] float32"),
        (lambda made: {"latent": made["latent"].half()}, r"latent \[5, latent_dim\] float32"),
        (lambda made: {"positions": made["positions"][:4]}, r"positions \[5\] int32 or int64"),
        (lambda made: {"cos_sin_cache": made["cos_sin_cache"][:, :32].contiguous()}, r"cos_sin_cache \[max_position, 64\]"),
        (lambda made: {"kv_cache": made["kv_cache"][..., :500]}, r"kv_cache \[num_pages, page_size, 576\]"),
        (lambda made: {"slot_mapping": made["slot_mapping"].int()}, r"slot_mapping \[5\] int64"),
        (lambda made: {"q_out": made["q_rope"][:, :1]}, r"q_out \[5, 16, 64\]"),
    ],
)
def test_bad_operands_are_refused(change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    made = _made()
    with pytest.raises(ShapeError, match=f"(?s)mla.rope_write_mla.*{message}"):
        rope_write_mla(**{**made, **change(made)})


def test_library_op() -> None:
    made = _made(LAYOUTS[2])
    names = ("q_rope", "k_rope", "latent", "positions", "cos_sin_cache", "kv_cache", "slot_mapping", "interleaved")
    arguments = (*(made[name] for name in names), None)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tokenspeed.rope_write_mla.default, arguments, test_utils=checks)
