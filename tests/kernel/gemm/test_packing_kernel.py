"""What an engine is told of the kernel that would pack a weight, before it loads any."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel import Band, Format, QuantizedTensor, dispatch
from tokenspeed_kernel.ops.gemm import pack_weight, packing_kernel

CPU = torch.device("cpu")


def test_it_is_the_kernel_that_packs() -> None:
    for fmt in ("gguf_q4_1@inline", "gguf_q8_0@inline", "nvfp4@block_16"):
        for rounds in (False, True):
            spec = packing_kernel(Format.parse(fmt), CPU, round_activations=rounds)
            assert spec.op == "gemm.pack_weight"
            if fmt.startswith("gguf"):
                blocks = torch.zeros(4, 20 if "q4_1" in fmt else 34, dtype=torch.uint8)
                packed = pack_weight(QuantizedTensor(blocks, fmt, (4, 32)), round_activations=rounds)
                assert packed.solution == spec.solution


def test_without_leave_to_round_no_fast_kernel_for_blocks_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel multiplies exactly; an engine that asks sees its band. A plugin may have a fast one that is exact."""
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "all")
    dispatch.reset()
    try:
        _check_portable()
    finally:
        monkeypatch.undo()
        dispatch.reset()


def _check_portable() -> None:
    assert packing_kernel(Format.parse("gguf_q4_1@inline"), CPU).band == Band.PORTABLE
    assert packing_kernel(torch.float32, CPU).op == "gemm.pack_weight"
