"""Loading from GGUF files, folders and names, and what is said when that cannot work."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizer_gguf_writer import write_gguf
from tokenizer_references import gguf_fields, spm_fields
from tokenizers import Tokenizer as BackendTokenizer

from tokenspeed_engine.checkpoint.gguf_metadata import GgufError
from tokenspeed_engine.tokenizer import TemplateError, Tokenizer, TokenizerError, UnsupportedTokenizerError, load_tokenizer


@pytest.fixture(scope="module")
def fields(smollm_path: Path) -> dict[str, Any]:
    return gguf_fields(smollm_path)


@pytest.fixture
def folder(qwen_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in qwen_folder.iterdir():
        shutil.copy(path, copy / path.name)
    return copy


def configure(folder: Path, name: str = "tokenizer_config.json", **changes: Any) -> None:
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_facts_of_the_default_model(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.eos_token_ids, smollm.bos_token_id) == (49_152, (2,), 1)
    assert smollm.has_chat_template
    assert smollm.special_token_ids == frozenset(range(17))
    assert smollm.encode("Hello") == smollm.encode("Hello", add_special_tokens=False)


def test_facts_of_the_folder(qwen: Tokenizer) -> None:
    assert (qwen.vocab_size, qwen.eos_token_ids, qwen.bos_token_id) == (151_646, (151_643, 151_645), None)
    assert qwen.special_token_ids == frozenset({151_643, 151_644, 151_645})


def test_token_bytes_and_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello 🌶", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == "Hello 🌶".encode()
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert (tokenizer.token_text(end), tokenizer.token_bytes(end), tokenizer.token_name(end)) == (
        "<|im_end|>",
        b"<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.token_name(ids[0]) == "Hello"
    for unknown in (tokenizer.vocab_size, tokenizer.vocab_size + 10_000, -1):
        assert (tokenizer.token_bytes(unknown), tokenizer.token_text(unknown), tokenizer.token_name(unknown)) == (b"", "", "")
    assert tokenizer.token_id("no such token") is None
    partial = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "\ufffd"]
    assert any(len(tokenizer.token_bytes(token_id)) == 1 for token_id in partial)


def test_every_token_has_the_text_that_the_library_gives_it(tokenizer: Tokenizer) -> None:
    backend = tokenizer.backend
    for token_id in range(0, tokenizer.vocab_size, 7):
        assert tokenizer.token_text(token_id) == backend.decode([token_id], skip_special_tokens=False)


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"lone surrogate U\+D800"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.encode_batch(["ok", "\udfff"])


def test_an_unknown_pre_tokenizer_is_refused_by_name(fields: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {**fields, "tokenizer.ggml.pre": "brand-new"})
    with pytest.raises(UnsupportedTokenizerError, match=r"qwen2.*smollm.*got 'brand-new'.*Fix:"):
        load_tokenizer(path)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2"])
def test_another_kind_of_vocabulary_is_refused_by_name(fields: dict[str, Any], tmp_path: Path, model: str) -> None:
    path = write_gguf(tmp_path / "x.gguf", {**fields, "tokenizer.ggml.model": model})
    with pytest.raises(UnsupportedTokenizerError, match=f"expected gpt2 or llama, got '{model}'"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model.*expected str, got nothing"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens.*expected list, got nothing"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "expected a list of strings"),
        ({"tokenizer.ggml.tokens": []}, "expected a list of strings"),
        ({"tokenizer.ggml.token_type": [1]}, "expected 49152 entries, got 1"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges.*expected list"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"merges\[0\].*two parts"),
        ({"tokenizer.ggml.eos_token_id": 50_000}, "eos_token_id.*expected an id in 0..49151, got 50000"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id.*got 'x'"),
        ({"tokenizer.chat_template": "{% if"}, "chat template"),
    ],
)
def test_keys_that_disagree_are_refused(fields: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str) -> None:
    changed = {key: value for key, value in {**fields, **change}.items() if value is not None}
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(write_gguf(tmp_path / "x.gguf", changed))


def test_sentencepiece_needs_scores(tmp_path: Path) -> None:
    fields = spm_fields()
    fields["tokenizer.ggml.scores"] = [0.0]
    with pytest.raises(TokenizerError, match=r"scores.*entries, got 1"):
        load_tokenizer(write_gguf(tmp_path / "x.gguf", fields))


def test_a_corrupt_gguf_file(smollm_path: Path, tmp_path: Path) -> None:
    with smollm_path.open("rb") as file:
        (tmp_path / "x.gguf").write_bytes(file.read(100_000))
    with pytest.raises(GgufError, match="truncated"):
        load_tokenizer(tmp_path / "x.gguf")


@pytest.mark.parametrize(("content", "message"), [(b"<html>", "got b'<htm'"), (b"", "an empty file"), (b"GG", "truncated")])
def test_a_file_that_is_gguf_by_its_name_alone(tmp_path: Path, content: bytes, message: str) -> None:
    """What a failed download leaves: the message is about the file, not about what else might hold a tokenizer."""
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(GgufError, match=message):
        load_tokenizer(tmp_path / "x.gguf")


def test_bos_and_eos_around_a_prompt(fields: dict[str, Any], tmp_path: Path) -> None:
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", {**fields, **flags}))
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [1, *plain, 2]
    spm = load_tokenizer(write_gguf(tmp_path / "spm.gguf", spm_fields()))
    assert spm.encode("the") == [1, *spm.encode("the", add_special_tokens=False)]
    del fields["tokenizer.ggml.add_bos_token"]
    llama3 = load_tokenizer(write_gguf(tmp_path / "l.gguf", {**fields, "tokenizer.ggml.pre": "llama-bpe"}))
    assert llama3.encode("Hello")[0] == 1


def test_ends_of_turn_that_a_file_names_only_in_its_vocabulary(tmp_path: Path) -> None:
    assert load_tokenizer(write_gguf(tmp_path / "x.gguf", spm_fields())).eos_token_ids == (
        2,
        len(spm_fields()["tokenizer.ggml.tokens"]) - 1,
    )


def test_a_gguf_file_may_have_no_template_or_several(fields: dict[str, Any], tmp_path: Path) -> None:
    del fields["tokenizer.chat_template"]
    bare = load_tokenizer(write_gguf(tmp_path / "x.gguf", fields))
    assert not bare.has_chat_template
    with pytest.raises(TemplateError, match=r"has none.*--chat-template"):
        bare.apply_chat_template([{"role": "user", "content": "x"}])
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    several = load_tokenizer(write_gguf(tmp_path / "y.gguf", {**fields, **named}))
    assert several.apply_chat_template([]) == "plain"
    assert several.apply_chat_template([], tools=[{}]) == "with tools"


def test_the_users_template_goes_first(smollm_path: Path, folder: Path) -> None:
    for path in (smollm_path, folder):
        tokenizer = load_tokenizer(path, chat_template="mine {{ eos_token }}")
        assert tokenizer.apply_chat_template([]) == "mine <|im_end|>"
    with pytest.raises(TemplateError, match="Fix: correct the template"):
        load_tokenizer(folder, chat_template="{% for %}")


def test_where_a_folder_keeps_its_template(folder: Path) -> None:
    configure(folder, chat_template="config")
    assert load_tokenizer(folder).apply_chat_template([]) == "config"
    named = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]
    configure(folder, chat_template=named)
    assert load_tokenizer(folder).apply_chat_template([]) == "listed"
    assert load_tokenizer(folder).apply_chat_template([], tools=[{}]) == "tools"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_tokenizer(folder).apply_chat_template([]) == "json"
    (folder / "chat_template.jinja").write_text("jinja {{ eos_token }}{{ bos_token }}")
    assert load_tokenizer(folder).apply_chat_template([]) == "jinja <|im_end|>"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert load_tokenizer(folder).apply_chat_template([], tools=[{}]) == "more"
    configure(folder, chat_template=[{"name": 1}])
    with pytest.raises(TokenizerError, match="expected name and template"):
        load_tokenizer(folder)


def test_where_a_folder_keeps_its_end_of_sequence(folder: Path) -> None:
    assert load_tokenizer(folder).eos_token_ids == (151_643, 151_645)
    (folder / "generation_config.json").unlink()
    configure(folder, "config.json", eos_token_id=151_644)
    assert load_tokenizer(folder).eos_token_ids == (151_644, 151_645)
    (folder / "config.json").unlink()
    configure(folder, eos_token={"content": "<|endoftext|>", "lstrip": False})
    assert load_tokenizer(folder).eos_token_ids == (151_643,)
    configure(folder, eos_token=None)
    configure(folder, "special_tokens_map.json", eos_token="<|im_start|>", bos_token="<|endoftext|>")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((151_644,), 151_643)


def test_truncation_and_padding_of_the_file_do_not_apply(folder: Path, qwen: Tokenizer) -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    text = "one two three four five six seven"
    assert load_tokenizer(folder).encode(text) == qwen.encode(text)
    assert load_tokenizer(folder).encode("one") == qwen.encode("one")


def test_what_may_be_named(folder: Path, smollm_path: Path, tmp_path: Path) -> None:
    assert load_tokenizer(folder / "tokenizer.json").vocab_size == 151_646
    (folder / "model.safetensors").write_bytes(b"")
    assert load_tokenizer(folder / "model.safetensors").vocab_size == 151_646
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.gguf").symlink_to(smollm_path)
    assert load_tokenizer(str(tmp_path / "one")).vocab_size == 49_152


def test_what_may_not_be_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match="got '/no/such/place', which is none of them"):
        load_tokenizer("/no/such/place")
    with pytest.raises(TokenizerError, match=r"'missing\.gguf'"):
        load_tokenizer("missing.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match="got 0 GGUF files"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "file.bin").write_bytes(b"1234")
    with pytest.raises(TokenizerError, match="expected a GGUF file"):
        load_tokenizer(tmp_path / "file.bin")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="is no JSON"):
        load_tokenizer(folder)


def test_a_name_that_the_hub_cannot_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TokenizerError, match=r"'nobody/nothing' is no local path.*Fix:"):
        load_tokenizer("nobody/nothing")


def test_a_folder_without_tokenizer_json_is_converted(tmp_path: Path, qwen: Tokenizer) -> None:
    """GPT-2's two files, vocab.json and merges.txt, through transformers."""
    pytest.importorskip("transformers", reason="needs transformers")
    state = json.loads(qwen.backend.to_str())["model"]
    kept = dict(list(state["vocab"].items())[:1000])
    names = set(kept)
    merges = [pair for pair in state["merges"] if {pair[0], pair[1], pair[0] + pair[1]} <= names]
    kept["<|endoftext|>"] = len(kept)
    (tmp_path / "vocab.json").write_text(json.dumps(kept), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("Hello world, this is text.", add_special_tokens=False)
    assert tokenizer.decode(ids) == "Hello world, this is text."
    assert tokenizer.vocab_size == 1001
    assert tokenizer.pieces is not None


def test_conversion_without_transformers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match="Fix: pip install transformers"):
        load_tokenizer(tmp_path)


def test_files_that_cannot_be_converted(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot convert its files.*Fix: add a tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("which", ["smollm", "qwen"])
def test_a_text_that_cannot_fit_is_told_by_its_length(which: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(which)
    one = tokenizer.max_chars(1)
    assert one is not None and tokenizer.max_chars(7) == 7 * one
    longest = max((tokenizer.token_text(i) for i in range(tokenizer.vocab_size)), key=len)
    joined = ("e\u0301" * 50, "\u1f82" * 20, "\u03b1\u0313\u0300\u0345" * 50, "\U0001f468\u200d" * 9)
    for text in (longest, longest * 3, " " * 5000, "a" * 3000, *joined):
        most = tokenizer.max_chars(len(tokenizer.encode(text, add_special_tokens=False)))
        assert most is not None and len(text) <= most


@pytest.mark.parametrize("lacks", ["a byte", "nothing, but swallows spaces", "nothing, but drops accents"])
def test_no_bound_where_characters_can_vanish(smollm: Tokenizer, lacks: str) -> None:
    spec = json.loads(smollm.backend.to_str())
    if lacks == "a byte":
        spec["model"]["vocab"] = {token: i for token, i in spec["model"]["vocab"].items() if token != "\u0120"}
        spec["model"]["merges"] = []
    elif "spaces" in lacks:
        spec["added_tokens"][0]["lstrip"] = True
    else:
        spec["normalizer"] = {"type": "StripAccents"}
    assert Tokenizer(BackendTokenizer.from_str(json.dumps(spec)), source="test").max_chars(5) is None
