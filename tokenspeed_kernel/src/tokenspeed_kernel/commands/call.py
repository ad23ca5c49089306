"""A call described by shapes, formats and options, or taken from the op's cases: what does it ask selection for?"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from tokenspeed_kernel.commands.questions import named_value, parse_value, signature_of
from tokenspeed_kernel.errors import ConfigError, close_names
from tokenspeed_kernel.probe import request_of
from tokenspeed_kernel.quantized import QuantizedTensor, data_shape, scale_shape
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.selection import Request
from tokenspeed_kernel.signature import Format
from tokenspeed_kernel.testing import public_op
from tokenspeed_kernel.testing.verify import cases_of

__all__ = ["request_of_case", "request_of_shapes"]


def request_of_case(op: str, label: str, dtype: torch.dtype) -> Request:
    """Return what a case of the op asks for.

    Raises:
        ConfigError: the op has no case of that label, or the case needs no kernel.
    """
    cases = {case.label: case for case in cases_of(op)}
    if label not in cases:
        raise ConfigError(f"{op}: no case is named {label!r}\nFix: {close_names(label, list(cases))}")
    case = cases[label]
    if not case.takes(dtype):
        dtype = case.dtypes[0]
    inputs = case.build(torch.Generator().manual_seed(0), torch.device("cpu"), dtype)
    return _needed(op, request_of(public_op(op), inputs))


def request_of_shapes(
    registry: Registry, op: str, shapes: Iterable[str], formats: Iterable[str], arguments: Iterable[str]
) -> Request:
    """Return what a call with tensors of these shapes asks for; no kernel runs.

    Args:
        registry: that has the op.
        op: `family.op`.
        shapes: `NAME=1x2x3` each.
        formats: `[NAME=]FORMAT` each; of a tensor that is no operand of the contract (an index), int32 where left out.
        arguments: `NAME=VALUE` each, for what is not a tensor.
    Raises:
        ConfigError: a name is not a parameter, a needed one is missing, or a shape is none.
        ShapeError: the op refuses the shapes.
    """
    parameters = inspect.signature(public_op(op)).parameters
    sizes = {name: _sizes(op, name, text) for name, text in (named_value(op, one) for one in shapes)}
    values = dict(named_value(op, one) for one in arguments)
    operands = registry.contract(op).operands
    named = dict(one.split("=", 1) for one in formats if "=" in one)
    for name in (*sizes, *values, *named):
        if name not in parameters or name == "solution":
            known = [one for one in parameters if one != "solution"]
            raise ConfigError(f"{op}: unknown parameter {name!r}\nFix: {close_names(name, known)}")
    signature = signature_of(registry, op, [one for one in formats if one.partition("=")[0] in operands or "=" not in one])
    made: dict[str, Any] = {name: parse_value(text) for name, text in values.items()}
    for name, size in sizes.items():
        fmt = Format.parse(named[name]) if name in named else None if signature is None else signature.get(name)
        if fmt is None and name in operands:
            raise ConfigError(f"{op}: no format for {name}\nFix: add --dtype {name}=bf16.")
        made[name] = _tensor(size, fmt or Format.of(torch.int32))
    missing = [name for name, one in parameters.items() if one.default is one.empty and name not in made]
    if missing:
        raise ConfigError(
            f"{op}: no {', '.join(missing)}\nFix: add --shape {missing[0]}=... for a tensor, --arg {missing[0]}=... for a value."
        )
    return _needed(op, request_of(public_op(op), made))


def _needed(op: str, request: Request | None) -> Request:
    if request is None:
        raise ConfigError(f"{op}: the call needs no kernel, there is nothing to compute\nFix: ask for a larger one.")
    return request


def _sizes(op: str, name: str, text: str) -> tuple[int, ...]:
    parts = [] if text == "scalar" else text.lower().split("x")
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"{op}: shape of {name}: expected sizes such as 16x4096, got {text!r}\nFix: write 16x4096, or scalar.")
    return tuple(int(part) for part in parts)


def _tensor(shape: tuple[int, ...], fmt: Format) -> torch.Tensor | QuantizedTensor:
    """Zeros, which take no memory as long as nobody touches them."""

    def part(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(size, dtype=dtype)
        except RuntimeError as error:  # PyTorch's allocator says it so
            sizes = "x".join(map(str, size))
            raise ConfigError(f"explain: {sizes} does not fit into memory\nFix: ask with --trait instead.") from error

    if str(fmt) == fmt.logical or fmt.scale == "none":
        return part(shape, fmt.storage)
    scales = scale_shape(fmt, shape)
    byte_scale = fmt.logical.startswith("mx") and fmt.logical != "mxint4"
    scale_dtype = torch.float8_e4m3fn if fmt.logical == "nvfp4" else torch.uint8 if byte_scale else torch.float32
    return QuantizedTensor(
        part(data_shape(fmt, shape), fmt.storage),
        fmt,
        shape,
        scale=None if scales is None else part(scales, scale_dtype),
        global_scale=part(shape[:-2], torch.float32) if fmt.logical == "nvfp4" else None,
        zero_point=part(scales, torch.uint8) if fmt.logical == "uint4" and scales is not None else None,
    )
