"""Plugins for the tests: small ones with a kernel whose result tells which one ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PluginSource = Callable[..., str]

_SOURCE = """
import torch
from tokenspeed_kernel import {imports}


def rms_norm(x, weight, *, eps=1e-6, out=None):
    result = torch.full_like(x, {value}, memory_format=torch.contiguous_format)
    return result if out is None else out.copy_(result)


PLUGIN = Plugin(
    api_version=(1, 0),
    specs=(
        KernelSpec(
            op="{op}", name="{name}_{kernel}", solution="{name}", band=Band.{band}, implementation="{name}_plugin:rms_norm",
            capability=Capability({targets}), formats=Signature.same(("x", "weight"), {formats}), requires={requires},
        ),
    ),
)
"""


@pytest.fixture(autouse=True)
def clean(clean_settings: None) -> None:
    """Every test here starts from the plain settings."""


@pytest.fixture
def plugin_source() -> PluginSource:
    """Source of the module `<name>_plugin`, whose kernel fills the output with `value`."""

    def source(
        name: str,
        value: float = 42,
        *,
        op: str = "norm.rms_norm",
        kernel: str = "rms_norm",
        band: str = "PLUGIN",
        targets: tuple[str, ...] = ("cpu",),
        formats: tuple[str, ...] = ("fp32",),
        requires: tuple[str, ...] = (),
    ) -> str:
        imports = "Band, Capability, KernelSpec, Plugin, Signature"
        facts = {"targets": repr(targets), "formats": repr(formats), "requires": repr(requires), "imports": imports}
        facts |= {"name": name, "value": str(value), "op": op, "kernel": kernel, "band": band}
        text = _SOURCE
        for key, fact in facts.items():
            text = text.replace("{" + key + "}", fact)
        return text

    return source
