"""Formats and signatures."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.errors import FormatError
from tokenspeed_kernel.signature import Format, Signature


@pytest.mark.parametrize("text", ["fp8", "FP8", "fp8@tensor", "fp4", "int4", "float8"])
def test_bare_fp8_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(FormatError, match=r"neither an encoding nor a scale layout\nFix: .*fp8_e4m3@block_128x128"):
        Format.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8_e4m3", "lacks a scale layout"),
        ("nvfp4", "lacks a scale layout"),
        ("bf16@tensor", "bf16 takes no scales"),
        ("fp8_e4m3@row", "unknown scale layout"),
        ("bf61", "did you mean bf16"),
        ("", "unknown ''"),
    ],
)
def test_incomplete_or_unknown_format_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Format.parse(text)


@pytest.mark.parametrize("text", ["bf16", "fp32", "int64", "fp8_e4m3@tensor", "fp8_e5m2@none", "nvfp4@block_16", "mxfp4@block_32"])
def test_text_form_goes_both_ways(text: str) -> None:
    assert str(Format.parse(text)) == text
    assert Format.parse(str(Format.parse(text))) == Format.parse(text)


def test_format_of_a_dtype() -> None:
    assert Format.of(torch.bfloat16) == Format.parse("bf16")
    assert Format.of(torch.float8_e4m3fn) == Format.parse("fp8_e4m3@none")
    with pytest.raises(FormatError, match=r"no format is stored as torch\.complex64"):
        Format.of(torch.complex64)


def test_signature_accepts_a_call_without_its_optional_operand() -> None:
    wide = Signature.of(x="bf16", weight="bf16", bias="fp32")
    assert wide.accepts(Signature.of(x=torch.bfloat16, weight=torch.bfloat16))
    assert not wide.accepts(Signature.of(x="bf16", weight="fp32"))
    assert not wide.accepts(Signature.of(x="bf16", weight="bf16", bias="fp32", scale="fp32"))
    assert str(wide) == "x=bf16, weight=bf16, bias=fp32"


def test_signature_builders() -> None:
    assert len(Signature.product(a=("fp32", "bf16"), b=("int32", "int64"))) == 4
    assert Signature.same(("a", "b"), ("fp16",)) == (Signature.of(a="fp16", b="fp16"),)
    assert Signature.of(a="fp16").overlaps(Signature.of(a="fp16", b="fp32"))
    assert not Signature.of(a="fp16", b="bf16").overlaps(Signature.of(a="fp16", b="fp32"))
