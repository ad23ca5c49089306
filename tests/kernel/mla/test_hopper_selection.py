"""Where the Hopper decode kernel is chosen: where it was measured ahead, with and without the vendors' libraries."""

from __future__ import annotations

import pytest

from tokenspeed_kernel import selection
from tokenspeed_kernel.platform import parse_platform
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.selection import Request
from tokenspeed_kernel.signature import Signature

VENDORS = ("flash_mla", "flashinfer")


@pytest.mark.parametrize(
    ("platform", "cache", "changes", "vendors", "expected"),
    [
        ("sm_90", "bf16", {"single_block": True}, True, "gluon_mla_decode_sm90"),
        ("sm_90", "bf16", {}, True, "gluon_mla_decode_sm90"),
        ("sm_90", "bf16", {"return_lse": True, "causal": False}, False, "gluon_mla_decode_sm90"),
        ("sm_90", "bf16", {"single_block": True, "few_rows": False}, True, "gluon_mla_decode_wide_sm90"),
        ("sm_90", "bf16", {"few_rows": False}, True, "flash_mla_decode_sm90"),
        ("sm_90", "bf16", {"few_rows": False}, False, "gluon_mla_decode_batch_sm90"),
        ("sm_90", "uint8", {}, True, "triton_mla_decode"),
        ("sm_90", "uint8", {"few_rows": False}, True, "triton_mla_decode"),
        ("sm_90", "uint8", {"page_size": 16}, True, "triton_mla_decode"),
        ("sm_90", "fp16", {}, False, "triton_mla_decode"),
        ("sm_90", "bf16", {"page_size": 16}, False, "triton_mla_decode"),
        ("sm_90", "bf16", {"latent_dim": 448}, False, "triton_mla_decode"),
        ("sm_100", "bf16", {}, False, "triton_mla_decode"),
        ("sm_100", "uint8", {}, False, "triton_mla_decode"),
        ("sm_80", "bf16", {}, False, "triton_mla_decode"),
    ],
)
def test_chosen(
    platform: str, cache: str, changes: dict[str, bool | int], vendors: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        selection, "library_problem", lambda library: None if vendors or library.module not in VENDORS else "not installed"
    )
    traits = {"latent_dim": 512, "rope_dim": 64, "page_size": 64, "causal": True, "return_lse": False}
    traits |= {"single_block": False, "few_rows": True, **changes}
    signature = Signature.of(q="bf16" if cache == "uint8" else cache, kv_cache=cache)
    request = Request("mla.mla_decode", parse_platform(platform), signature=signature, traits=traits)
    assert selection.select(collect_builtin().freeze(), request).name == expected
