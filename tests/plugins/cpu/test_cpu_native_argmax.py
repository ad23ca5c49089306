"""Greedy tokens: the first of the largest logits, wherever it stands."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.sampling import argmax


def test_greedy_tokens(instruction_set: str) -> None:
    """Every place of a row, also beyond whole vectors and blocks; ties, rows that cannot be sampled, strided operands."""
    for columns in (1, 7, 16, 33, 511, 513, 1500):
        logits = torch.randn(4, columns)
        for row, place in enumerate((0, columns // 3, columns // 2, columns - 1)):
            logits[row, place] = 9.0
        logits[0, -1] = logits[0].max()
        for column in range(0, columns, 97):
            logits[1] = -1.0
            logits[1, column] = 0.0
            expected = argmax(logits, solution="reference")
            assert torch.equal(argmax(logits, solution="cpu_native"), expected)
        assert torch.equal(argmax(logits.t().contiguous().t(), solution="cpu_native"), expected)
        out = torch.full((4, 2), -7, dtype=torch.int32)
        argmax(torch.cat((logits, logits), 1)[:, :columns], out=out[:, 1], solution="cpu_native")
        assert torch.equal(out[:, 1], expected) and (out[:, 0] == -7).all()
        for value in (float("nan"), float("inf"), float("-inf")):
            broken = logits.clone()
            broken[1], broken[2, columns // 2], broken[3, -1] = float("-inf"), value, value
            assert torch.equal(argmax(broken, solution="cpu_native"), argmax(broken, solution="reference"))
    zeros = torch.tensor([[-0.0, 0.0], [0.0, -0.0]])
    assert argmax(zeros, solution="cpu_native").tolist() == [0, 0]
    assert argmax(torch.empty(0, 5), solution="cpu_native").shape == (0,)
