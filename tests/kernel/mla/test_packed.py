"""Packed rows of a latent cache: their bytes, what the rounding costs, and errors that say what to do."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.ops import mla
from tokenspeed_kernel.ops.mla.cases import LatentBatch, decode_inputs
from tokenspeed_kernel.ops.mla.packed import pack_rows, row_bytes, unpack_rows

CPU = torch.device("cpu")


def _inputs(**changes: Any) -> dict[str, Any]:
    batch = LatentBatch("packed", (2, 2), (40, 9), latent_dim=128, rope_dim=16, **changes)
    return decode_inputs(batch, torch.Generator().manual_seed(1), CPU)


def test_the_bytes_are_the_documented_ones() -> None:
    assert row_bytes(512, 64) == 656
    latent = torch.zeros(1, 256)
    latent[0, 0], latent[0, 1], latent[0, 2] = 896.0, -2.0, 3.1  # the scale is 2: codes 448, -1, 1.55, which is nearest to 1.5
    latent[0, 128], latent[0, 255] = 0.0, 112.0  # 1/4: 448
    row = bytes(pack_rows(latent, torch.tensor([[1.0, -2.5]]))[0].tolist())
    assert len(row) == 256 + 8 + 4 == row_bytes(256, 2)
    assert row[:4] == bytes((0x7E, 0xB8, 0x3C, 0))
    assert row[255] == 0x7E
    assert struct.unpack("=2f", row[256:264]) == (2.0, 0.25)
    assert row[264:] == struct.pack("=HH", 0x3F80, 0xC020)


def test_rounding_costs_a_sixteenth_at_most() -> None:
    rows = torch.randn(50, 512 + 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 6, 50)[:, None]
    back = unpack_rows(pack_rows(rows[:, :512], rows[:, 512:]), 512, torch.float64)
    blocks, found = rows[:, :512].double().unflatten(1, (4, 128)), back[:, :512].unflatten(1, (4, 128))
    # Three bits of mantissa: half a sixteenth of the number, or half of the smallest code.
    bound = torch.maximum(blocks.abs() / 16, blocks.abs().amax(2, keepdim=True) / 448 * 2.0**-10)
    assert bool(((found - blocks).abs() <= bound * (1 + 1e-6)).all())
    assert torch.equal(back[:, 512:].bfloat16(), rows[:, 512:].bfloat16())


@pytest.mark.parametrize("solution", ["cpu", "reference"])
def test_attention_is_that_to_the_rounded_rows(solution: str) -> None:
    inputs = _inputs()
    rows = inputs["kv_cache"].nan_to_num().flatten(0, 1)
    packed = torch.zeros((*inputs["kv_cache"].shape[:2], row_bytes(128, 16)), dtype=torch.uint8)
    mla.write_mla_cache(rows[:, :128], rows[:, 128:], packed, torch.arange(len(rows)), solution=solution)
    rounded = unpack_rows(packed.flatten(0, 1), 128, torch.float32).view_as(inputs["kv_cache"])
    want, want_lse = mla.mla_decode(**{**inputs, "kv_cache": rounded}, return_lse=True, solution=solution)
    got, lse = mla.mla_decode(**{**inputs, "kv_cache": packed}, return_lse=True, solution=solution)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    plain = mla.mla_decode(**inputs, solution=solution)
    assert not torch.allclose(got, plain, atol=1e-5), "the rows were rounded"
    torch.testing.assert_close(got, plain, atol=0.1, rtol=0.1)


def test_errors_say_what_fits() -> None:
    inputs = _inputs(packed=True)
    cache = inputs["kv_cache"]
    wide = torch.zeros((cache.shape[0], cache.shape[1], cache.shape[2] + 2), dtype=torch.uint8)
    for change, message in (
        ({"latent_dim": 96}, "latent_dim a multiple of 128 and rope_dim even"),
        ({"kv_cache": cache[..., :144]}, r"\[num_pages, page_size, 164\] uint8: 128 fp8, 1 fp32, 16 bf16"),
        ({"kv_cache": wide[..., 2:]}, "multiples of 4 bytes"),
        ({"kv_cache": cache[0]}, r"kv_cache \[num_pages, page_size >= 1, 144\]"),
    ):
        with pytest.raises(ShapeError, match=message):
            mla.mla_decode(**{**inputs, **change})
    latent, rope, slots = torch.zeros(3, 128), torch.zeros(3, 16), torch.arange(3)
    for arguments, message in (
        ((latent[:, :96], rope, cache, slots), "latent_dim a multiple of 128"),
        ((latent, rope[:, :15], cache, slots), "rope_dim even"),
        ((latent, rope[:, :14], cache, slots), r"\[num_pages, page_size, 160\] uint8"),
    ):
        with pytest.raises(ShapeError, match=message):
            mla.write_mla_cache(*arguments)
