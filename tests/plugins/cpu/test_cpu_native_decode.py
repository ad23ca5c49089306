"""Decode attention: pages, masks, options, threads; every cache here is NaN where no key is."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention import mha_decode
from tokenspeed_kernel.ops.attention.cases import Batch, decode_inputs

pytestmark = pytest.mark.usefixtures("instruction_set")


def _check(batch: Batch, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = {**decode_inputs(batch), **more}
    want, want_lse = mha_decode(**call, return_lse=True, solution="reference")
    out = torch.full_like(call["q"], math.nan)
    got, lse = mha_decode(**call, return_lse=True, out=out, solution="cpu_native")
    assert got is out
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(mha_decode(**call, solution="cpu_native"), got)
    return got, lse


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (14, 2, 24), (5, 1, 128), (3, 1, 5)])
@pytest.mark.parametrize("window", [None, 1, 33])
def test_pages_heads_windows(page_size: int, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> None:
    lengths = (1, 31, 0, 33, 64, 150)
    _check(Batch("", (1,) * 6, lengths, num_heads, num_kv_heads, head_dim, page_size, sliding_window=window))


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_cap_and_sinks(cap: float, sinks: bool) -> None:
    _check(Batch("", (1, 1, 1), (70, 0, 5), 6, 2, 32, 16, logit_cap=cap, sinks=sinks), softmax_scale=0.7)


def test_rows_without_keys() -> None:
    got, lse = _check(Batch("", (1, 1), (0, 9), missing_pages=((1, 0), (1, 1), (1, 2))))
    assert got.eq(0).all()
    assert lse.eq(-math.inf).all()


def test_a_page_in_the_middle_is_missing() -> None:
    missing = tuple((row, page) for row in range(4) for page in (0, 3 + row))
    _check(Batch("", (1,) * 4, (200, 180, 170, 200), 4, 2, 16, 16, missing_pages=missing))


def test_large_logits_do_not_overflow() -> None:
    call = decode_inputs(Batch("", (1, 1), (90, 40), 4, 2, 16, 16))
    call["q"] *= 300
    want = mha_decode(**call, solution="reference")
    torch.testing.assert_close(mha_decode(**call, solution="cpu_native"), want, rtol=1e-4, atol=1e-4)


def test_other_strides() -> None:
    batch = Batch("", (1,) * 3, (40, 7, 90), 4, 2, 16, 16)
    call = decode_inputs(batch)
    want = mha_decode(**call, solution="cpu_native")
    pool = torch.full((call["k_cache"].shape[0], 2, 16, 3, 16), math.nan)
    for name, place in (("k_cache", pool[:, 0, :, 1:]), ("v_cache", pool[:, 1, :, :2])):
        call[name] = place.copy_(call[name])
    call["q"] = torch.cat((call["q"], call["q"]), dim=1)[:, :4]
    call["page_table"] = call["page_table"].repeat_interleave(2, dim=1)[:, ::2]
    call["seq_lens"] = call["seq_lens"].repeat_interleave(2)[::2]
    out = torch.full((3, 8, 16), math.nan)
    assert torch.equal(mha_decode(**call, out=out[:, 2:6], solution="cpu_native"), want)
    assert out[:, :2].isnan().all()
    assert out[:, 6:].isnan().all()


def test_results_do_not_depend_on_threads_or_batch() -> None:
    for lengths in ((700,), (300, 5, 600, 1, 299, 300, 64, 63, 65, 512)):  # by heads, by rows
        call = decode_inputs(Batch("", (1,) * len(lengths), lengths, 9, 3, 64, 16))
        threads, results = torch.get_num_threads(), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(mha_decode(**call, return_lse=True, solution="cpu_native"))
        finally:
            torch.set_num_threads(threads)
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])
        for row in range(len(lengths)):
            one = {**call, **{name: call[name][row : row + 1] for name in ("q", "page_table", "seq_lens")}}
            assert torch.equal(mha_decode(**one, solution="cpu_native"), results[0][0][row : row + 1])


def test_several_python_threads_at_once() -> None:
    calls = [decode_inputs(Batch("", (1,) * 8, (200,) * 8, 9, 3, 64, 16), seed=seed) for seed in range(4)]
    want = [mha_decode(**call, solution="cpu_native") for call in calls]
    same = [True] * 4

    def work(index: int) -> None:
        for _ in range(50):
            same[index] &= torch.equal(mha_decode(**calls[index], solution="cpu_native"), want[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same)


def test_a_length_beyond_the_page_table_is_refused() -> None:
    call = decode_inputs(Batch("", (1, 1), (5, 9), page_size=4))
    call["seq_lens"] = torch.tensor([5, 4 * call["page_table"].shape[1] + 1], dtype=torch.int32)
    out = torch.full_like(call["q"], math.nan)
    with pytest.raises(ShapeError, match=r"seq_lens <= max_pages \* page_size = 16"):
        mha_decode(**call, out=out, solution="cpu_native")
    assert out.isnan().all()
