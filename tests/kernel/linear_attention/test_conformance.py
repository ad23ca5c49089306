"""Every kernel of the family against the float64 recurrences: on the CPU, in Triton's interpreter, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.testing import check_case, family_cases
from tokenspeed_kernel.testing.interpreter import device_numbers

CASES = family_cases("linear_attention")
SMALL = [case for case in CASES if not case.bench]
LONG = ("chunks", "around a chunk", "chunks of strong decay")
"""Several seconds each in the interpreter; half precision takes the second of them without --slow."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def _brief(case: Case) -> bool:
    """Whether a run on a GPU takes this case without --slow: each compiles a kernel or two."""
    label = case.label.removesuffix(", half precision")
    if label == case.label:
        return label in ("odd sizes", "fresh states", "few tokens")
    return label in ("odd sizes", "strided", "outside", "plain", "strong decay", "empty requests", "fresh states", "chunks",
                     "no request", "few tokens", "parameters of x's dtype")  # fmt: skip


def _runs(cases: list[Case], dtypes: tuple[torch.dtype, ...]) -> list[object]:
    runs = [(case, dtype) for case in cases for dtype in dtypes if case.takes(dtype)]
    return [pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}") for case, dtype in runs]


@pytest.mark.parametrize(("case", "dtype"), _runs(SMALL, DTYPES))
def test_cpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="cpu", device=torch.device("cpu"), dtype=dtype)


@interpreted
@pytest.mark.parametrize(("case", "dtype"), _runs([case for case in SMALL if case.label not in LONG], (torch.float32,)))
def test_triton_interpreted(case: Case, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=torch.device("cpu"), dtype=dtype)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), _runs([case for case in SMALL if case.label in LONG], (torch.float32,)))
def test_triton_interpreted_for_long(case: Case, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=torch.device("cpu"), dtype=dtype)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), _runs(SMALL, (torch.float16, torch.bfloat16)))
def test_triton_interpreted_in_half_precision(case: Case, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="needs triton")
    with device_numbers():
        check_case(case, solution="triton", device=torch.device("cpu"), dtype=dtype)


@interpreted
@pytest.mark.parametrize("label", ["one token", "plain", "parameters of x's dtype", "around a chunk"])
def test_triton_interpreted_in_half_precision_briefly(label: str) -> None:
    pytest.importorskip("triton", reason="needs triton")
    cases = [case for case in SMALL if case.label == f"{label}, half precision"]
    assert len(cases) >= 3
    with device_numbers():
        for case in cases:
            check_case(case, solution="triton", device=torch.device("cpu"), dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), _runs([case for case in SMALL if _brief(case)], (torch.float32, torch.bfloat16)))
def test_triton_on_gpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), _runs([case for case in SMALL if not _brief(case)], DTYPES))
def test_triton_on_gpu_in_all_cases(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), _runs([case for case in CASES if case.bench], (torch.bfloat16,)))
def test_triton_on_gpu_at_model_sizes(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


def test_every_option_has_a_case() -> None:
    given: dict[str, set[object]] = {}
    for case in SMALL:
        dtype = next(dtype for dtype in DTYPES if case.takes(dtype))
        inputs = case.build(torch.Generator().manual_seed(0), torch.device("cpu"), dtype)
        for name, value in inputs.items():
            seen = given.setdefault(f"{case.op}.{name}", set())
            seen.add(value if value is None or isinstance(value, (bool, float, str, tuple)) else type(value))
    optional = ("has_initial_state", "scale", "bias", "activation", "d", "z", "dt_bias", "dt_limit", "qk_l2norm", "dt_softplus")
    names = [name for name in given if name.rpartition(".")[2] in optional]
    assert len(names) == 2 * len(optional) + 1  # each in two ops, has_initial_state in three
    for name in names:
        assert len(given[name]) >= 2, f"only {given[name]} for {name}"
