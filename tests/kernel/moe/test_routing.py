"""What `topk_routing` promises, on numbers that can be checked by hand, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel.errors import NoKernelError, ShapeError
from tokenspeed_kernel.ops.moe import topk_routing

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["reference", "cpu", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "triton":
        pytest.importorskip("triton", reason="needs triton")
    return name


def _route(solution: str, logits: list[list[float]], top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    device = "cuda" if solution == "triton" and torch.cuda.is_available() else "cpu"
    if "correction_bias" in options:
        options["correction_bias"] = torch.tensor(options["correction_bias"], device=device)
    weights, ids = topk_routing(torch.tensor(logits, device=device), top_k, solution=solution, **options)
    assert weights.dtype is torch.float32
    assert ids.dtype is torch.int32
    return weights.cpu(), ids.cpu()


def test_softmax_over_all_and_over_the_chosen(solution: str) -> None:
    logits = torch.log(torch.tensor([[1.0, 4.0, 2.0, 3.0]])).tolist()
    weights, ids = _route(solution, logits, 2)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.3]]))
    for options in ({"renormalize": True}, {"scoring": "topk_softmax"}):
        weights, ids = _route(solution, logits, 2, **options)
        assert ids.tolist() == [[1, 3]]
        torch.testing.assert_close(weights, torch.tensor([[4 / 7, 3 / 7]]))


def test_ties_go_to_the_lowest_index(solution: str) -> None:
    for scoring in ("softmax", "sigmoid", "topk_softmax"):
        assert _route(solution, [[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]], 4, scoring=scoring)[1].tolist() == [[1, 2, 4, 0]]


def test_bias_counts_for_choosing_only(solution: str) -> None:
    weights, ids = _route(solution, [[0.0, 0.0, 0.0]], 2, scoring="sigmoid", correction_bias=[0.0, 5.0, 1.0], scaling_factor=3.0)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 2), 1.5))


def test_groups_by_the_sum_of_two_and_by_the_maximum(solution: str) -> None:
    """Group 0 has the best expert, group 1 the best pair."""
    logits = [[3.0, -4.0, -4.0, 2.0, 2.0, -4.0, 0.0, 0.0, 0.0]]
    options = {"num_groups": 3, "top_groups": 1, "scoring": "sigmoid"}
    assert _route(solution, logits, 2, **options, group_score="top2_sum")[1].tolist() == [[3, 4]]
    assert _route(solution, logits, 2, **options, group_score="max")[1].tolist() == [[0, 1]]


def test_barred_groups_are_barred_whatever_the_bias(solution: str) -> None:
    """With scores below zero, an expert of a barred group must not win by standing at zero."""
    weights, ids = _route(
        solution, [[0.0, 0.0, 9.0, 9.0]], 2,
        scoring="sigmoid", num_groups=2, top_groups=1, group_score="top2_sum", correction_bias=[-5.0, -5.0, -9.0, -9.0],
    )  # fmt: skip
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.full((1, 2), 0.5))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_nothing_is_nan(solution: str, scoring: str) -> None:
    rows = [[NAN] * 4, [NAN, 1.0, NAN, 0.0], [-INF] * 4, [INF, INF, 0.0, 1.0], [INF, -INF, NAN, 2.0]]
    for renormalize in (False, True):
        weights, ids = _route(solution, rows, 2, scoring=scoring, renormalize=renormalize, correction_bias=[NAN, 0.0, 0.0, 0.0])
        assert weights.isfinite().all()
        weights, ids = _route(solution, rows, 2, scoring=scoring, renormalize=renormalize)
        assert weights.isfinite().all()
        # Beside an infinite logit every other softmax is 0.
        last = [0, 1] if scoring == "softmax" else [0, 3]
        assert ids.tolist() == [[0, 1], [1, 3], [0, 1], [0, 1], last]
        assert all(len(set(row)) == 2 for row in ids.tolist())


def test_every_choice_is_distinct_and_in_range(solution: str) -> None:
    logits = torch.randn(20, 24).mul(3).round().tolist()
    _, ids = _route(solution, logits, 12, scoring="sigmoid", num_groups=4, top_groups=2, correction_bias=torch.randn(24).tolist())
    for row in ids.tolist():
        assert len(set(row)) == 12
        assert len({one // 6 for one in row}) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "expected 1 <= top_k <= 8"),
        ({"top_k": 9}, "expected 1 <= top_k <= 8"),
        ({"top_k": 5, "num_groups": 4, "top_groups": 2}, "expected 1 <= top_k <= 4"),
        ({"num_groups": 3}, "expected num_groups that divides 8 experts"),
        ({"num_groups": 4, "top_groups": 5}, "1 <= top_groups <= num_groups"),
        ({"scoring": "relu"}, "expected scoring in {softmax, sigmoid, topk_softmax}, got 'relu'"),
        ({"group_score": "mean"}, "expected group_score in {max, top2_sum}, got 'mean'"),
        ({"correction_bias": torch.zeros(7)}, "expected correction_bias [8], got [7]"),
        ({"weights_out": torch.zeros(3, 3)}, "expected weights_out [3, 2], got [3, 3]"),
        ({"weights_out": torch.zeros(3, 2).half()}, "expected weights_out torch.float32"),
        ({"ids_out": torch.zeros(3, 2).long()}, "expected ids_out torch.int32, got torch.int64"),
        ({"logits": torch.zeros(3)}, "expected logits [num_tokens, num_experts], got [3]"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        topk_routing(**{"logits": torch.zeros(3, 8), "top_k": 2, **options})
    assert message in str(caught.value)


def test_formats_that_no_kernel_takes() -> None:
    with pytest.raises(NoKernelError, match="logits in"):
        topk_routing(torch.zeros(3, 8, dtype=torch.int32), 2)
