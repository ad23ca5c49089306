"""The plugin is installed, listed, chosen for its formats on the CPU, and for nothing else."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from tokenspeed_kernel import dispatch, parse_platform
from tokenspeed_kernel.cli import main
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.plugins import load_registry

KERNELS = {
    "cpu_native_apply_rope",
    "cpu_native_embedding",
    "cpu_native_fused_add_rms_norm",
    "cpu_native_argmax",
    "cpu_native_mha_decode",
    "cpu_native_mha_extend",
    "cpu_native_mha_prefill",
    "cpu_native_mm",
    "cpu_native_pack_weight",
    "cpu_native_pack_weight_exact",
    "cpu_native_rms_norm",
    "cpu_native_silu_and_mul",
    "cpu_native_write_kv",
}
DECODE = ("explain", "attention.mha_decode", "--trait", "head_dim=64", "--trait", "page_size=16")


def _cli(*arguments: str, **environment: str) -> str:
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        for name, value in environment.items():
            patch.setenv(name, value)
        dispatch.reset()  # settings and plugins are read again
        assert main(list(arguments)) == 0
    dispatch.reset()
    return told.getvalue()


def test_the_plugin_is_installed_and_whole() -> None:
    registry = load_registry(KernelConfig())
    record = next((one for one in registry.plugins if one.name == "cpu_native"), None)
    assert record is not None, "the plugin is not installed: pip install ./plugins/tokenspeed_kernel_cpu"
    assert record.loaded, record.error
    assert record.provides == KERNELS | {"cpu_native"}


def test_list_shows_it() -> None:
    listed = _cli("list")
    assert all(name in listed for name in KERNELS)
    assert "plugin cpu_native (tokenspeed-kernel-cpu 0.1.0): loaded" in listed


def test_it_is_chosen_for_its_formats_alone() -> None:
    assert "cpu_native_mha_decode: chosen" in _cli(*DECODE, "--platform", "cpu+avx2", "--dtype", "fp32")
    half = _cli(*DECODE, "--platform", "cpu+avx2", "--dtype", "fp16")
    assert "cpu_mha_decode: chosen" in half
    assert "cpu_native_mha_decode: rejected" in half


def test_what_explain_says_of_quantized_weights() -> None:
    """Golden: rounding activations is a condition that is told, and a wrong format's reason names those that are taken."""
    weight = ("explain", "gemm.pack_weight", "--platform", "cpu+avx2", "--dtype")
    allowed = _cli(*weight, "weight=gguf_q4_1@inline", "--trait", "round_activations=true")
    assert "cpu_native_pack_weight: chosen" in allowed
    refused = _cli(*weight, "weight=gguf_q4_1@inline", "--trait", "round_activations=false")
    assert "cpu_native_pack_weight: rejected" in refused
    assert "cpu_native_pack_weight_exact: chosen" in refused
    assert "round_activations=True, got False" in refused
    other = _cli(*weight, "weight=nvfp4@block_16", "--trait", "round_activations=true")
    assert "cpu_native_pack_weight: rejected" in other
    assert "gguf_q4_k@inline" in other


def test_a_processor_without_avx2_is_the_reason() -> None:
    told = _cli(*DECODE, "--platform", "cpu", "--dtype", "fp32")
    assert "needs avx2, which cpu lacks" in told
    assert "cpu_mha_decode: chosen" in told


def test_it_can_be_left_out() -> None:
    told = _cli(*DECODE, "--platform", "cpu+avx2", "--dtype", "fp32", TOKENSPEED_KERNEL_DISABLE_PLUGINS="cpu_native")
    assert "cpu_mha_decode: chosen" in told


def test_listing_loads_no_kernel() -> None:
    code = (
        "import sys; from tokenspeed_kernel.plugins import load_registry; load_registry();"
        "assert 'tokenspeed_kernel_cpu.plugin' in sys.modules; print('tokenspeed_kernel_cpu._kernels' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_which_instruction_set_is_in_use() -> None:
    from tokenspeed_kernel_cpu import _kernels

    assert _kernels.instruction_set() == _kernels.instruction_sets()[0]
    assert set(_kernels.instruction_sets()) <= {"avx2", "avx512", "avx512_vnni", "amx"}
    with pytest.raises(ValueError, match=r"expected one of .*avx2, got sse"):
        _kernels.use_instruction_set("sse")
    assert "avx2" not in parse_platform("cpu").features
