"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def gguf_files() -> ModuleType:
    """The module gguf_files.py; tests are imported by path, so that it is no package's part."""
    name = "tests_engine_checkpoint_gguf_files"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("gguf_files.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
