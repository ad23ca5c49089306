"""A cache of another type than the activations is tried before it is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokenspeed_engine.kvcache import KVCacheTypeError, KVLayout, check_cache_dtype
from tokenspeed_kernel import dispatch

CPU = torch.device("cpu")


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "all")
    dispatch.reset()
    yield
    monkeypatch.undo()
    dispatch.reset()


def test_the_compute_type_needs_no_trial() -> None:
    check_cache_dtype(KVLayout(1, 1, 8, 4, torch.float32), torch.float32, CPU)


def test_a_type_without_a_kernel_is_refused_with_the_flag_and_the_reasons(without_plugins: None) -> None:
    message = r"--kv-cache-dtype float16: no kernel for (.|\n)*got(.|\n)*Fix: use --kv-cache-dtype auto"
    with pytest.raises(KVCacheTypeError, match=message):
        check_cache_dtype(KVLayout(1, 1, 8, 4, torch.float16), torch.float32, CPU)
