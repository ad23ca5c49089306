"""What `permute` and `unpermute` promise, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.moe import permute, unpermute


@pytest.fixture(params=["reference", "cpu", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "triton":
        pytest.importorskip("triton", reason="needs triton")
    return name


@pytest.fixture
def device(solution: str) -> str:
    return "cuda" if solution == "triton" and torch.cuda.is_available() else "cpu"


def test_order_offsets_and_places(solution: str, device: str) -> None:
    x = torch.arange(3.0, device=device)[:, None] + torch.tensor([0.0, 0.5], device=device)
    ids = torch.tensor([[2, 0], [-1, 2], [0, 7]], dtype=torch.int32, device=device)
    rows, offsets, places = permute(x, ids, num_experts=4, solution=solution)
    assert offsets.tolist() == [0, 2, 2, 4, 4]
    assert places.tolist() == [[2, 0], [-1, 3], [1, -1]]
    assert rows.tolist() == [[0.0, 0.5], [2.0, 2.5], [0.0, 0.5], [1.0, 1.5], [0.0, 0.0], [0.0, 0.0]]


def test_only_experts_of_this_rank(solution: str, device: str) -> None:
    ids = torch.tensor([[5, 4], [3, 6], [4, 0]], dtype=torch.int32, device=device)
    _, offsets, places = permute(torch.ones(3, 1, device=device), ids, num_experts=2, first_expert=4, solution=solution)
    assert offsets.tolist() == [0, 2, 3]
    assert places.tolist() == [[2, 0], [-1, -1], [1, -1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back(solution: str, device: str, dtype: torch.dtype) -> None:
    x = torch.randn(11, 20, device=device).to(dtype)
    ids = torch.randint(-1, 6, (11, 3), dtype=torch.int32, device=device)
    weights = torch.rand(11, 3, device=device)
    rows, _, places = permute(x, ids, num_experts=6, solution=solution)
    got = unpermute(rows, places, weights, solution=solution)
    share = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
    torch.testing.assert_close(got, (x.float() * share).to(dtype), rtol=1e-2, atol=1e-2)


def test_the_addend_may_be_the_output(solution: str, device: str) -> None:
    rows = torch.randn(6, 5, device=device)
    places = torch.tensor([[0, 3], [-1, -1], [5, 6]], dtype=torch.int32, device=device)
    weights = torch.rand(3, 2, device=device)
    addend = torch.randn(3, 5, device=device)
    want = unpermute(rows, places, weights, addend=addend.clone(), solution="reference")
    assert unpermute(rows, places, weights, addend=addend, out=addend, solution=solution) is addend
    torch.testing.assert_close(addend, want)
    assert torch.equal(addend[1], want[1])


def test_equal_inputs_give_equal_bits(solution: str, device: str) -> None:
    """A token's sum does not depend on the batch that it comes in."""
    rows = torch.randn(64, 33, device=device)
    places = torch.randperm(64, device=device).int().view(16, 4)
    weights = torch.rand(16, 4, device=device)
    together = unpermute(rows, places, weights, solution=solution)
    for token in range(16):
        alone = unpermute(rows, places[token : token + 1], weights[token : token + 1], solution=solution)
        assert torch.equal(together[token], alone[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk_ids": torch.zeros(3, 2).long()}, "expected topk_ids int32, got torch.int64"),
        ({"topk_ids": torch.zeros(4, 2).int()}, "expected x [num_tokens, hidden_size] and topk_ids [num_tokens, top_k]"),
        ({"x": torch.zeros(3)}, "expected x [num_tokens, hidden_size]"),
        ({"num_experts": 0}, "expected num_experts >= 1, got 0"),
    ],
)
def test_what_permute_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        permute(**{"x": torch.zeros(3, 8), "topk_ids": torch.zeros(3, 2).int(), "num_experts": 4, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_of_pair": torch.zeros(3, 2).long()}, "expected row_of_pair torch.int32"),
        ({"topk_weights": torch.zeros(3, 2).half()}, "expected topk_weights torch.float32"),
        ({"topk_weights": torch.zeros(3, 1)}, "row_of_pair and topk_weights [num_tokens, top_k]"),
        ({"addend": torch.zeros(3, 7)}, "expected addend [3, 8], got [3, 7]"),
        ({"addend": torch.zeros(3, 8).half()}, "expected addend torch.float32, got torch.float16"),
        ({"out": torch.zeros(6, 8)}, "expected out [3, 8], got [6, 8]"),
        ({"out": torch.zeros(3, 8).half()}, "expected out torch.float32"),
    ],
)
def test_what_unpermute_refuses(options: dict[str, Any], message: str) -> None:
    inputs = {"rows": torch.zeros(6, 8), "row_of_pair": torch.zeros(3, 2).int(), "topk_weights": torch.zeros(3, 2)}
    with pytest.raises(ShapeError) as caught:
        unpermute(**{**inputs, **options})
    assert message in str(caught.value)
