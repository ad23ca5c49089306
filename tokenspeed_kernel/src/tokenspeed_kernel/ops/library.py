"""The form in `torch.library` of ops that return an output and, asked for, its LSE; for torch.compile and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.dispatch import register_library_op

__all__ = ["register"]


def register(
    name: str,
    arguments: str,
    eager: Callable[..., Any],
    shape: Callable[[dict[str, Any]], tuple[int, ...]],
    num_positional: int,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Define ``tokenspeed::<name>`` over the eager op. It always returns (output, LSE); the LSE is empty unless asked for.

    Args:
        name: of the op.
        arguments: of the schema; they end with ``bool return_lse, str? solution``.
        eager: public op; the first ``num_positional`` arguments are passed by position, the others by name.
        shape: of the output, from the arguments by name.
        num_positional: see ``eager``.
    Returns:
        The operator.
    """
    parameters = [argument.split()[-1].partition("=")[0] for argument in arguments.split(", ")]

    def implementation(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        named |= zip(parameters, given, strict=False)
        operands = [named.pop(parameter) for parameter in parameters[:num_positional]]
        attended = eager(*operands, **named)
        if isinstance(attended, tuple):
            return attended
        return attended, attended.new_empty((0,), dtype=torch.float32)

    def fake(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        named |= zip(parameters, given, strict=False)
        q, size = named["q"], shape(named)
        # The dispatcher leaves out trailing arguments that have their default.
        lse = q.new_empty(size[:-1] if named.get("return_lse", False) else (0,), dtype=torch.float32)
        return q.new_empty(size), lse

    operator: Callable[..., tuple[torch.Tensor, torch.Tensor]] = register_library_op(
        f"{name}({arguments}) -> (Tensor, Tensor)", implementation, fake
    )
    return operator
