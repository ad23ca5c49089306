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


@pytest.fixture(params=["avx2", "avx512", "avx512_vnni"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let the kernels use one instruction set, and then what they had."""
    from tokenspeed_kernel_cpu import _kernels

    before = _kernels.instruction_set()
    try:
        _kernels.use_instruction_set(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    _kernels.use_instruction_set(before)
