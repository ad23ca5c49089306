"""The embedding ops: every kernel against the reference, and shapes."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.errors import NoKernelError, ShapeError
from tokenspeed_kernel.ops.embedding import embedding
from tokenspeed_kernel.ops.embedding.cases import CASES
from tokenspeed_kernel.testing import check_case

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if not case.bench], ids=str)
def test_triton_interpreted(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=CPU, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_on_gpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


@pytest.mark.parametrize("solution", [None, "cpu", "reference"])
def test_ids_outside_the_table_give_zero_rows(solution: str | None) -> None:
    weight = torch.arange(1, 7, dtype=torch.float32).view(3, 2)
    got = embedding(torch.tensor([2, -1, 0, 3, 2**40]), weight, solution=solution)
    assert got.tolist() == [[5, 6], [0, 0], [1, 2], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("ids", "weight", "out", "message"),
    [
        ((2, 3), (5, 4), None, r"expected token_ids \[num_tokens\] and weight \[vocab, hidden\], got token_ids \[2, 3\]"),
        ((2,), (5,), None, r"weight \[5\]"),
        ((2,), (5, 4), (2, 5), r"expected out \[2, 4\] torch\.float32, got \[2, 5\]"),
    ],
)
def test_shape_errors(ids: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        embedding(torch.zeros(ids, dtype=torch.int64), torch.zeros(weight), out=None if out is None else torch.zeros(out))


def test_dtypes_are_checked() -> None:
    with pytest.raises(ShapeError, match=r"got \[2, 4\] torch\.float16"):
        embedding(torch.zeros(2, dtype=torch.int64), torch.zeros(5, 4), out=torch.zeros(2, 4).half())
    with pytest.raises(NoKernelError, match=r"cpu_embedding: token_ids in \{int32, int64\}, got int16"):
        embedding(torch.zeros(2, dtype=torch.int16), torch.zeros(5, 4))
