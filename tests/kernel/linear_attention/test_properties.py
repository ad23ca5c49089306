"""What must hold whatever the numbers are: splits, batches, edges, memory around the slots, pools beyond 2**31 elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops.linear_attention import (
    causal_conv1d_prefill,
    causal_conv1d_update,
    gdn_decode,
    gdn_prefill,
    mamba2_prefill,
    selective_state_update,
)
from tokenspeed_kernel.ops.linear_attention.cases import Shape, conv_inputs, gdn_inputs, mamba2_inputs

PREFILLS = [(gdn_prefill, gdn_inputs), (causal_conv1d_prefill, conv_inputs), (mamba2_prefill, mamba2_inputs)]
PAIRS = [
    (gdn_prefill, gdn_decode, gdn_inputs),
    (causal_conv1d_prefill, causal_conv1d_update, conv_inputs),
    (mamba2_prefill, selective_state_update, mamba2_inputs),
]
PER_TOKEN = ("q", "k", "v", "g", "beta", "x", "dt", "b", "c", "z")
NAMES = ["gdn", "conv", "mamba2"]


@pytest.fixture(params=["cpu", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Every solution that runs on this machine without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


def _made(inputs: Callable[..., Any], shape: Shape) -> dict[str, Any]:
    made: dict[str, Any] = inputs(shape, ragged=True)(torch.Generator().manual_seed(3), torch.device("cpu"), torch.float32)
    return made


def _rows(made: dict[str, Any], rows: slice | torch.Tensor, **changes: Any) -> dict[str, Any]:
    return {name: value[rows] if name in PER_TOKEN and value is not None else value for name, value in made.items()} | changes


@pytest.mark.parametrize(("op", "inputs"), PREFILLS, ids=NAMES)
@pytest.mark.parametrize("split", [1, 2, 64, 69])
def test_two_parts_are_one(op: Callable[..., torch.Tensor], inputs: Callable[..., Any], split: int, solution: str) -> None:
    shape = Shape("whole", (70,), 1, 2)
    whole, parts = _made(inputs, shape), _made(inputs, shape)
    want = op(**whole, solution=solution)
    got = []
    for rows in (slice(0, split), slice(split, 70)):
        bounds = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        got.append(op(**_rows(parts, rows, cu_seqlens=bounds), solution=solution))
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts["states"], whole["states"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("prefill", "decode", "inputs"), PAIRS, ids=NAMES)
def test_decoding_continues_a_prefill(
    prefill: Callable[..., torch.Tensor], decode: Callable[..., torch.Tensor], inputs: Callable[..., Any], solution: str
) -> None:
    shape = Shape("whole", (9,), 1, 2)
    whole, parts = _made(inputs, shape), _made(inputs, shape)
    want = prefill(**whole, solution=solution)
    uniform = {name: value for name, value in parts.items() if name not in ("cu_seqlens", "has_initial_state")}
    got = []
    for start, end in ((0, 1), (1, 5), (5, 8), (8, 9)):
        rows = _rows(uniform, slice(start, end))
        step = {name: value[None] if name in PER_TOKEN and value is not None else value for name, value in rows.items()}
        got.append(decode(**step, solution=solution)[0])
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts["states"], whole["states"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("op", "inputs"), PREFILLS, ids=NAMES)
def test_a_request_does_not_depend_on_its_batch(op: Callable[..., torch.Tensor], inputs: Callable[..., Any], solution: str) -> None:
    shape = Shape("batch", (5, 20, 3), 1, 2)
    batch, alone = _made(inputs, shape), _made(inputs, shape)
    want = op(**batch, solution=solution)[5:25]
    bounds = torch.tensor([0, 20], dtype=torch.int32)
    got = op(**_rows(alone, slice(5, 25), cu_seqlens=bounds, state_indices=alone["state_indices"][1:2]), solution=solution)
    assert torch.equal(got, want)
    assert torch.equal(alone["states"][2], batch["states"][2])


@pytest.mark.parametrize(("op", "inputs"), PREFILLS, ids=NAMES)
def test_other_slots_and_empty_requests_keep_their_state(
    op: Callable[..., torch.Tensor], inputs: Callable[..., Any], solution: str
) -> None:
    made = _made(inputs, Shape("empty", (0, 4, 0), 1, 2, slots=(2, 1, -1), fresh=None))
    made["states"][[0, 3, 4]] = math.nan  # what belongs to nobody here spreads nowhere
    made["has_initial_state"] = torch.tensor([False, True, True])
    before = made["states"].clone()
    assert bool(op(**made, solution=solution).isfinite().all())
    assert torch.equal(made["states"][2], before[2])
    assert not torch.equal(made["states"][1], before[1])
    assert bool(made["states"][[0, 3, 4]].isnan().all())


def test_closed_forms(solution: str) -> None:
    made = _made(gdn_inputs, Shape("closed", (3,), 1, 1))
    state = made["states"][1].clone()
    # beta 0 and no decay: the state stays, and the output is what it holds at q.
    still = {**made, "beta": torch.zeros_like(made["beta"]), "g": torch.zeros_like(made["g"]), "scale": 1.0, "qk_l2norm": False}
    got = gdn_prefill(**still, solution=solution)
    torch.testing.assert_close(made["states"][1], state)
    torch.testing.assert_close(got, torch.einsum("thk,hkv->thv", made["q"], state), rtol=1e-4, atol=1e-4)
    # beta 1 with a key of length 1: reading back at the key gives the value.
    k = torch.nn.functional.normalize(made["k"], dim=-1)
    read_back = {**still, "q": k, "k": k, "beta": torch.ones_like(made["beta"]), "g": made["g"]}
    got = gdn_prefill(**read_back, solution=solution)
    torch.testing.assert_close(got, made["v"], rtol=1e-4, atol=1e-4)
    # Complete decay: what was there before is gone, though it is not finite arithmetic on the logarithm.
    gone = {**made, "g": torch.full_like(made["g"], -math.inf), "scale": 1.0, "qk_l2norm": False}
    got = gdn_prefill(**gone, solution=solution)
    want = (gone["q"] * gone["k"]).sum(-1, keepdim=True) * gone["beta"][..., None] * gone["v"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_one_strong_decay_leaves_what_follows_exact(solution: str) -> None:
    made, truth = (_made(gdn_inputs, Shape("one strong decay", (60,), 1, 1, decay=0.05)) for _ in range(2))
    for one in (made, truth):
        one["g"][5] = -1e6
    got, want = gdn_prefill(**made, solution=solution), gdn_prefill(**truth, solution="reference")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made["states"], truth["states"], rtol=1e-5, atol=1e-5)


def test_repeated_keys_are_solved_exactly(solution: str) -> None:
    """The powers of this triangular system have entries of 1e17."""
    made, truth = (_made(gdn_inputs, Shape("repeated", (64,), 1, 1, decay=0.0, beta=1.0)) for _ in range(2))
    for one in (made, truth):
        one["k"][:] = one["k"][:1]
    got, want = gdn_prefill(**made, solution=solution), gdn_prefill(**truth, solution="reference")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def _far_pool(path: Path, *state: int) -> torch.Tensor:
    """[2, *state] fp32 whose second slot lies more than 2**31 elements behind the first, in a file with few written pages."""
    elements = 2**31 + 64
    size = math.prod(state)
    with path.open("wb") as file:
        file.truncate(4 * (elements + size))
    if path.stat().st_blocks * 512 > 2**20:
        pytest.skip("needs a file system with sparse files")
    storage = torch.from_file(str(path), shared=True, size=elements + size, dtype=torch.float32)
    strides = torch.empty(state).stride()
    return storage.as_strided((2, *state), (elements, *strides))


@pytest.mark.parametrize(("prefill", "decode", "inputs"), PAIRS, ids=NAMES)
def test_pool_beyond_2_31_elements(
    prefill: Callable[..., torch.Tensor],
    decode: Callable[..., torch.Tensor],
    inputs: Callable[..., Any],
    solution: str,
    tmp_path: Path,
) -> None:
    """Report K3: an offset of 32 bits would have wrapped to a slot that is not there."""
    made = _made(inputs, Shape("far", (3,), 1, 2))
    near, pool = made["states"], _far_pool(tmp_path / "pool", *made["states"].shape[1:])
    pool[1] = near[1]
    uniform = {name: value[None] if name in PER_TOKEN and value is not None else value for name, value in made.items()}
    uniform = {name: value for name, value in uniform.items() if name not in ("cu_seqlens", "has_initial_state")}
    for op, arguments in ((prefill, made), (decode, uniform)):
        want = op(**arguments, solution=solution)
        got = op(**{**arguments, "states": pool}, solution=solution)
        assert torch.equal(got, want)
        assert torch.equal(pool[1], near[1])
        assert not bool(pool[0].any())
