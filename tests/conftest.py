"""Options and fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton's kernels run in its interpreter. Triton reads the variable when it is first imported, which any
    test module may cause: it is set before one is collected."""
    if _cuda_reason() is not None:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _cuda_reason() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device; torch sees none"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine or this run leaves out, and say why."""
    cuda_reason: str | None = ""
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords:
            cuda_reason = _cuda_reason() if cuda_reason == "" else cuda_reason
            if cuda_reason:
                item.add_marker(pytest.mark.skip(reason=cuda_reason))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that is tested."""
    return Path(os.environ.get("TOKENSPEED_REPOSITORY") or REPOSITORY)
