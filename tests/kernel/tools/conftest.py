"""No setting of the caller's environment, one thread, nothing bound before and after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokenspeed_kernel import dispatch


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the tests of the core have it."""
    for name in ("DISABLE", "DISABLE_PLUGINS", "PREFER", "TUNING"):
        monkeypatch.delenv(f"TOKENSPEED_KERNEL_{name}", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dispatch.reset()
    yield
    dispatch.reset()
    torch.set_num_threads(threads)
