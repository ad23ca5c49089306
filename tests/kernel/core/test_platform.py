"""Platforms and the targets that cover them (public report R3)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tokenspeed_kernel.errors import PlatformError
from tokenspeed_kernel.platform import KNOWN_PLATFORMS, Target, Vendor, _check_torch, current_platform, parse_platform, platform_of

COVERED = {
    "sm_90a": {"sm_90"},
    "sm_100a": {"sm_100"},
    "sm_103a": {"sm_103"},
    "sm_100f": {"sm_100", "sm_103", "sm_107"},
    "sm_103f": {"sm_103", "sm_107"},
    "sm_110f": {"sm_110"},
    "sm_120f": {"sm_120", "sm_121"},
    "sm_121f": {"sm_121"},
    "sm_120": {"sm_120", "sm_121"},
    "sm_80": {"sm_80", "sm_86", "sm_87", "sm_89"},
    "sm_86": {"sm_86", "sm_87", "sm_89"},
    "sm_90": {"sm_90"},
    "gfx942": {"gfx942"},
    "gfx950": {"gfx950"},
    "amd>=gfx942": {"gfx942", "gfx950"},
    "amd": {"gfx90a", "gfx942", "gfx950"},
    "nvidia>=sm_100": {"sm_100", "sm_103", "sm_107", "sm_110", "sm_120", "sm_121"},
    "nvidia": {name for name in KNOWN_PLATFORMS if name.startswith("sm_")},
    "cpu": {"cpu"},
    "any": set(KNOWN_PLATFORMS),
}


@pytest.mark.parametrize("target", COVERED)
def test_target_covers_what_its_code_runs_on_and_nothing_else(target: str) -> None:
    assert {name for name in KNOWN_PLATFORMS if Target(target).covers(parse_platform(name))} == COVERED[target]


@pytest.mark.parametrize("text", ["sm90", "sm_9", "sm_130f", "hopper", "cpu>=avx2", "amd>=gfx1100", "nvidia>=90", "a>=b>=c", ""])
def test_unknown_target_is_refused(text: str) -> None:
    with pytest.raises(PlatformError, match="Fix: use any, cpu"):
        Target(text)


def test_parse() -> None:
    assert parse_platform("sm_103").capability == (10, 3)
    assert parse_platform("gfx950").vendor is Vendor.AMD
    assert parse_platform("CPU+avx2").features == {"avx2"}


@pytest.mark.parametrize(
    ("text", "hint"), [("sm90", "sm_90"), ("gfx940", "gfx942"), ("sm_90+avx2", "sm_90"), ("tpu", "known: cpu")]
)
def test_unknown_platform_is_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(PlatformError, match=hint):
        parse_platform(text)


def test_device_without_kernels_is_refused() -> None:
    with pytest.raises(PlatformError, match="expected cpu or cuda"):
        platform_of(torch.device("mps"))


def test_current_platform_is_this_machine() -> None:
    platform = current_platform()
    assert (platform.vendor is Vendor.CPU) == (not torch.cuda.is_available())


def test_import_starts_no_device_and_imports_no_kernel() -> None:
    program = """
import sys, torch, tokenspeed_kernel
from tokenspeed_kernel.plugins import load_registry
registry = load_registry()
assert not torch.cuda.is_initialized()
assert "triton" not in sys.modules, "triton was imported"
loaded = {spec.implementation.split(":")[0] for spec in registry} & set(sys.modules)
assert not loaded, loaded
print(len(registry.ops()), "ops")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 5


@pytest.mark.parametrize("version", ["2.8.1", "2.8.0+cu128", "1.13.0"])
def test_an_older_torch_is_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(ImportError, match=r"expected torch 2\.9 or later, got .*\nFix: pip install 'torch>=2\.9'\."):
        _check_torch(version)


@pytest.mark.parametrize("version", ["2.9.0", "2.9.0a0+git1234", "2.11.0+cu130", "2.13.0+cpu", "3.0.0.dev20270101"])
def test_a_torch_of_the_range_is_taken(version: str) -> None:
    _check_torch(version)
