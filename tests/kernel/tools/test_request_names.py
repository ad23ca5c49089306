"""A request that names something the op does not have is refused, rather than answered as if nothing had been said."""

from __future__ import annotations

import pytest

from tokenspeed_kernel.errors import ConfigError, FormatError
from tokenspeed_kernel.platform import parse_platform
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.selection import Request, select
from tokenspeed_kernel.signature import Signature

CPU = parse_platform("cpu")


def test_unknown_trait() -> None:
    request = Request("attention.mha_decode", CPU, traits={"page_sice": 16})
    with pytest.raises(ConfigError, match=r"unknown trait 'page_sice'\nFix: did you mean page_size\?"):
        select(collect_builtin().freeze(), request)


def test_unknown_operand() -> None:
    request = Request("gemm.mm", CPU, Signature.of(x="bf16", weigth="bf16"))
    with pytest.raises(FormatError, match=r"unknown operand 'weigth'\nFix: did you mean weight\?"):
        select(collect_builtin().freeze(), request)
