"""Each instruction set that this processor has."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SKIP = "the plugin is for x86-64 processors"


def _load_helpers() -> None:
    """Tests are imported by path, so that a module beside them is no package's part: it is entered by name."""
    name = "quantized_weights"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


_load_helpers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Elsewhere there is nothing to test; on x86-64 a plugin that is not installed is a failure."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=SKIP))


def _use(name: str) -> Iterator[str]:
    from tokenspeed_kernel_cpu import _kernels

    before, known = _kernels.instruction_set(), _kernels.instruction_sets()
    name = known[0] if name == "best" else name
    if name not in known:
        pytest.skip(f"needs a processor with {name}")
    _kernels.use_instruction_set(name)
    yield name
    _kernels.use_instruction_set(before)


@pytest.fixture(params=["avx2", "best"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The least and the best instruction set that this processor has: between these the code differs in vector width alone."""
    yield from _use(request.param)


@pytest.fixture(params=["avx2", "avx512", "avx512_vnni"])
def byte_products(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set: products of bytes have code of their own for each."""
    yield from _use(request.param)
