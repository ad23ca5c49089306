"""Refusals, selection, torch.library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import NoKernelError, ShapeError
from tokenspeed_kernel.ops import sampling

ROWS, SIZE = 3, 20
LOGITS = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(9))
UNIFORM = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
FILTERS = (torch.ones(ROWS), torch.tensor([0, 4, 1], dtype=torch.int32), torch.full((ROWS,), 0.9), torch.zeros(ROWS))
OFFSETS = torch.tensor([0, 1, 1, 3], dtype=torch.int32)
IDS = torch.tensor([5, 6, 7], dtype=torch.int32)
TOKENS = torch.tensor([1, 2, 3], dtype=torch.int32)
CHAIN = torch.stack((LOGITS, LOGITS.flip(0)), 1)
SEEDS = torch.arange(ROWS)
ONES = torch.ones(ROWS)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampling.argmax(LOGITS[0]), r"argmax: expected logits \[R, V\].*got \[20\]"),
        (lambda: sampling.argmax(LOGITS[:, :0]), r"V >= 1"),
        (lambda: sampling.argmax(LOGITS, out=torch.empty(3)), r"out \[3\] int32 on cpu, got \[3\] float32"),
        (lambda: sampling.sample(LOGITS, UNIFORM.float(), *FILTERS), r"uniform \[3\] float64"),
        (lambda: sampling.sample(LOGITS, UNIFORM[:2], *FILTERS), r"uniform \[3\] float64.*got \[2\]"),
        (lambda: sampling.sample(LOGITS, UNIFORM, ONES, ONES, ONES, ONES), r"top_k \[3\] int32"),
        (lambda: sampling.sampling_probs(LOGITS, *FILTERS, out=LOGITS), r"apart from logits"),
        (lambda: sampling.sampling_probs(LOGITS, *FILTERS, out=torch.empty(SIZE, ROWS).t()), r"contiguous"),
        (lambda: sampling.philox_uniform(SEEDS.int(), SEEDS), r"seeds \[3\] int64"),
        (lambda: sampling.philox_uniform(SEEDS, SEEDS, stream=2**32), r"stream in 0"),
        (lambda: sampling.apply_logit_bias(LOGITS, OFFSETS[:3], IDS, ONES), r"row_offsets \[4\] int32"),
        (lambda: sampling.apply_logit_bias(LOGITS, OFFSETS, IDS, ONES[:2]), r"bias \[3\] float32"),
        (lambda: sampling.apply_penalties(LOGITS, OFFSETS, IDS, ONES, ONES, ONES, ONES), r"output_counts \[3\] int32"),
        (
            lambda: sampling.apply_penalties(LOGITS, OFFSETS, IDS, IDS, ONES, ONES, ONES, pending=TOKENS[:1]),
            r"pending \[3\] int32",
        ),
        (lambda: sampling.log_probs(LOGITS, TOKENS, top_n=21), r"top_n in 0..20, got 21"),
        (lambda: sampling.log_probs(LOGITS, TOKENS, top_n=-1), r"top_n in 0..20, got -1"),
        (lambda: sampling.log_probs(LOGITS, TOKENS.long()), r"token_ids \[3\] int32"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()


def test_an_unknown_format_gets_the_reasons() -> None:
    with pytest.raises(NoKernelError, match="cpu_argmax"):
        sampling.argmax(_double(LOGITS))
    with pytest.raises(NoKernelError, match="cpu_apply_logit_bias"):
        sampling.apply_logit_bias(LOGITS.bfloat16(), OFFSETS, IDS, ONES)


CALLS = {
    "argmax": (LOGITS,),
    "sample": (LOGITS, UNIFORM, *FILTERS),
    "sampling_probs": (LOGITS, *FILTERS),
    "philox_uniform": (SEEDS, SEEDS),
    "apply_penalties": (LOGITS, OFFSETS, IDS, IDS, ONES, ONES, ONES),
    "apply_logit_bias": (LOGITS, OFFSETS, IDS, ONES),
    "log_probs": (LOGITS, TOKENS),
    "verify_chain": (CHAIN, IDS.view(ROWS, 1), UNIFORM.repeat(2, 1).t(), *FILTERS),
}


@pytest.mark.parametrize("op", CALLS)
def test_library_op(op: str) -> None:
    torch.library.opcheck(getattr(torch.ops.tokenspeed, op).default, CALLS[op])


def test_library_op_of_verify_chain_with_draft_probs() -> None:
    more = (LOGITS.softmax(-1)[:, None], UNIFORM[:, None], "reference")
    torch.library.opcheck(torch.ops.tokenspeed.verify_chain.default, (*CALLS["verify_chain"], *more))


@pytest.mark.parametrize("op", CALLS)
def test_a_compiled_call_is_one_node_without_breaks(op: str) -> None:
    function = getattr(sampling, op)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    got, expected = compiled(*CALLS[op]), function(*CALLS[op])
    for mine, truth in zip(*((one if isinstance(one, tuple) else (one,)) for one in (got, expected)), strict=True):
        assert torch.equal(mine, truth)
