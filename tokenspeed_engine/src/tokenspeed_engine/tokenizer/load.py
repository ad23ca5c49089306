"""Find and load a tokenizer: a GGUF file, a local folder, or an id on the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from tokenspeed_engine.checkpoint.gguf_metadata import is_gguf, read_gguf_metadata
from tokenspeed_engine.tokenizer.chat_template import ChatTemplate
from tokenspeed_engine.tokenizer.encode import Tokenizer
from tokenspeed_engine.tokenizer.errors import TokenizerError
from tokenspeed_engine.tokenizer.gguf_vocab import tokenizer_from_gguf

# What a folder may hold of a tokenizer; nothing else is fetched from the Hub.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
_CONVERTIBLE_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TOKENIZER_CONFIG = "tokenizer_config.json"


def load_tokenizer(path: str | os.PathLike[str], *, chat_template: str | None = None, revision: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        path: a GGUF file; a folder with tokenizer.json (or files that transformers can convert, or one GGUF file); a
            tokenizer.json, or a .safetensors file beside one; or a Hugging Face id.
        chat_template: Jinja source to use in place of the model's own.
        revision: branch, tag or commit on the Hub; only with an id.
    Returns:
        Tokenizer.
    Raises:
        TokenizerError: nothing usable is there; the message says what was looked for.  UnsupportedTokenizerError: the kind is
        not supported.  TemplateError: the template does not compile.  GgufError: the GGUF file is corrupt.
    """
    place = Path(path).expanduser()
    if place.is_file():
        # By its name too: of a file that is none, the reader says what is wrong with it.
        if is_gguf(place) or place.suffix == ".gguf":
            return tokenizer_from_gguf(read_gguf_metadata(place), str(place), chat_template)
        if place.name == "tokenizer.json" or place.suffix == ".safetensors":
            return _from_folder(place.parent, chat_template)
        raise TokenizerError(f"load tokenizer: expected a GGUF file, a tokenizer.json or a .safetensors beside one, got {place}")
    if place.is_dir():
        return _from_folder(place, chat_template)
    name = os.fspath(path)
    if not _HUB_ID.fullmatch(name) or name.endswith((".gguf", ".json")):
        raise TokenizerError(
            f"load tokenizer: expected a file, a folder or a Hugging Face id, got {name!r}, which is none of them. "
            "Fix: check the path."
        )
    return _from_folder(_download(name, revision), chat_template)


def _download(repo_id: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=list(_TOKENIZER_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TokenizerError(
            f"load tokenizer: {repo_id!r} is no local path, and the Hub did not give it: {error}. "
            "Fix: check the name, the network and HF_TOKEN, or download the model and pass its folder."
        ) from error


def _from_folder(folder: Path, chat_template: str | None) -> Tokenizer:
    config = _json(folder / _TOKENIZER_CONFIG)
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
    elif any((folder / name).is_file() for name in _CONVERTIBLE_FILES):
        backend = _converted(folder)
    else:
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return tokenizer_from_gguf(read_gguf_metadata(files[0]), str(files[0]), chat_template)
        raise TokenizerError(
            f"load tokenizer: expected tokenizer.json, {', '.join(_CONVERTIBLE_FILES)} or one GGUF file in {folder}, "
            f"got {len(files)} GGUF files and none of the others. Fix: pass the GGUF file itself, or add tokenizer.json."
        )
    special = _special_tokens(folder, config)
    templates = {"default": chat_template} if chat_template is not None else _templates(folder, config)
    bos = special.get("bos_token")
    return Tokenizer(
        backend,
        source=str(folder),
        eos_token_ids=_eos_ids(folder, backend, special.get("eos_token")),
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        chat_template=ChatTemplate(templates, special, str(folder)) if templates else None,
    )


def _read_backend(path: Path) -> BackendTokenizer:
    try:
        return BackendTokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself, never a subclass
        raise TokenizerError(f"load tokenizer: {path} cannot be read: {error}. Fix: download the file again.") from error


def _converted(folder: Path) -> BackendTokenizer:
    try:
        # Only folders without a tokenizer.json pay for this import, and only they need the package.
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(
            f"load tokenizer: {folder} has no tokenizer.json, and transformers, which could convert its files, is not "
            "installed. Fix: pip install transformers, or add a tokenizer.json."
        ) from error
    try:
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        raise TokenizerError(
            f"load tokenizer: {folder} has no tokenizer.json, and transformers cannot convert its files: "
            f"{' '.join(str(error).split())} Fix: add a tokenizer.json."
        ) from error
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, BackendTokenizer):
        raise TokenizerError(
            f"load tokenizer: {folder} has no tokenizer.json, and {type(slow).__name__} has no fast form. "
            "Fix: add a tokenizer.json."
        )
    return backend


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"load tokenizer: {path} is no JSON: {error}. Fix: download the file again.") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"load tokenizer: {path}: expected an object, got {type(value).__name__}")
    return value


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Names such as bos_token with their text. The value is a string, or an object with `content`."""
    merged = {**_json(folder / "special_tokens_map.json"), **config}
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = merged.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_ids(folder: Path, backend: BackendTokenizer, eos_token: str | None) -> set[int]:
    """Every id that generation_config.json (else config.json) and the tokenizer call an end of sequence."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        ids.update(token_id for token_id in listed if isinstance(token_id, int))
        if ids:
            break
    named = None if eos_token is None else backend.token_to_id(eos_token)
    return ids if named is None else ids | {named}


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. A chat_template.jinja goes before chat_template.json, that before tokenizer_config.json."""
    named = dict(_listed(config.get("chat_template"), folder / _TOKENIZER_CONFIG))
    named.update(_listed(_json(folder / "chat_template.json").get("chat_template"), folder / "chat_template.json"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        named["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return named


def _listed(value: Any, path: Path) -> Iterator[tuple[str, str]]:
    if value is None:
        return
    if isinstance(value, str):
        yield "default", value
        return
    entries = value if isinstance(value, list) else []
    if not entries:
        raise TokenizerError(f"load tokenizer: {path}: chat_template: expected text or a list of name and template")
    for entry in entries:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise TokenizerError(f"load tokenizer: {path}: chat_template: expected name and template, got {entry!r}")
        yield name, text
