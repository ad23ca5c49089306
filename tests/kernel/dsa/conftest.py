"""Without a GPU, Triton kernels run in Triton's interpreter; Triton reads the variable when a kernel is defined."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products are slower on several threads when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
