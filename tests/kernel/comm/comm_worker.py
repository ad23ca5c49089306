"""One process of a group: runs every check in order, and writes down what became of each. Started by `test_comm`."""

from __future__ import annotations

import datetime as dt
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenspeed_kernel import GroupError, NoKernelError, ShapeError
from tokenspeed_kernel.ops import comm
from tokenspeed_kernel.ops.norm import fused_add_rms_norm
from tokenspeed_kernel.testing import check_case, family_cases

DEVICE = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
CASES = [case for case in family_cases("comm") if not case.bench]
Check = Callable[[], None]


def refused(error: type[Exception], *words: str, call: Callable[[], Any]) -> None:
    """The call raises the error, and its message holds each of the words."""
    try:
        call()
    except error as raised:
        text = str(raised)
        assert all(word in text for word in words), f"{words} not all in: {text}"
    else:
        raise AssertionError(f"{error.__name__} was not raised")


def before_initialisation() -> None:
    """Without a process group each op says so."""
    x = torch.ones(4, 4)
    for op in (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.all_to_all):
        refused(GroupError, "initialised", "init_process_group", call=lambda op=op: op(x))
        refused(GroupError, "'nobody'", call=lambda op=op: op(x, "nobody"))
    refused(GroupError, "initialised", call=lambda: comm.all_reduce_add_rms_norm(x, x, torch.ones(4)))


def arithmetic() -> None:
    """Against results worked out by hand, not by the reference."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0) + 10 * rank
    total = 10.0 * sum(range(size))
    assert comm.all_reduce(x).tolist() == [total + size * value for value in range(4)]
    assert comm.all_reduce(x, reduce="max").tolist() == [10.0 * (size - 1) + value for value in range(4)]
    assert comm.all_reduce(x, reduce="min").tolist() == [0.0, 1.0, 2.0, 3.0]
    rows = torch.arange(2.0 * size)[:, None] + 100 * rank
    expected = [[100.0 * sum(range(size)) + size * (2 * rank + row)] for row in range(2)]
    assert comm.reduce_scatter(rows).tolist() == expected
    assert comm.all_gather(torch.tensor([rank])).tolist() == list(range(size))
    assert comm.all_to_all(torch.arange(size) + 100 * rank).tolist() == [rank + 100 * other for other in range(size)]


def same_bits_everywhere() -> None:
    """Sums round differently in different orders: all processes must use one."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        everyone = comm.all_gather(comm.all_reduce(x.to(dtype))[None].view(torch.uint8))
        assert (everyone == everyone[0]).all(), dtype


def integers() -> None:
    """Exact, and wrapping as the dtype does."""
    size = dist.get_world_size()
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        largest = torch.iinfo(dtype).max
        got = comm.all_reduce(torch.tensor([largest, 1], dtype=dtype))
        assert got.tolist() == (torch.tensor([largest, 1], dtype=dtype) * size).tolist(), dtype


def in_place_and_strided_outputs() -> None:
    size = dist.get_world_size()
    x = torch.ones(3, 4)
    assert comm.all_reduce(x, out=x) is x
    assert (x == size).all()
    strided = torch.full((4, 3), float("nan")).t()
    assert comm.all_reduce(torch.ones(3, 4), out=strided) is strided
    assert (strided == size).all()
    whole = torch.full((5, 3 * size), float("nan")).t()
    assert comm.all_gather(torch.ones(3, 5), out=whole) is whole
    assert (whole == 1).all()
    x, residual = torch.ones(2, 8), torch.full((2, 8), 3.0)
    normed, total = comm.all_reduce_add_rms_norm(x, residual, torch.ones(8), out=x, residual_out=residual)
    assert normed is x
    assert total is residual
    assert (residual == size + 3).all()
    torch.testing.assert_close(x, torch.ones(2, 8))


def fused_equals_separate() -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(5, 96, generator=generator).bfloat16()
    residual, weight = torch.linspace(-3, 3, 480).view(5, 96).bfloat16(), torch.linspace(0.5, 2, 96).bfloat16()
    got = comm.all_reduce_add_rms_norm(x, residual, weight, eps=1e-5)
    want = fused_add_rms_norm(comm.all_reduce(x), residual, weight, eps=1e-5)
    assert all(torch.equal(mine, truth) for mine, truth in zip(got, want, strict=True))


def groups() -> None:
    """A group, its name and None; a part of the processes; one that this process is not in."""
    size, rank = dist.get_world_size(), dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    x = torch.ones(2)
    for group in (None, world, world.group_name):
        assert comm.all_reduce(x, group).tolist() == [size, size]
    members = list(range(0, size, 2))
    part = dist.new_group(members)
    if rank in members:
        assert comm.all_gather(torch.tensor([rank]), part).tolist() == members
        assert comm.all_reduce(torch.tensor([rank]), part.group_name, solution="reference").tolist() == [sum(members)]
    else:
        refused(GroupError, "belongs to", call=lambda: comm.all_reduce(x, part))
    refused(GroupError, "'no such group'", call=lambda: comm.all_reduce(x, "no such group"))
    refused(GroupError, "int", call=lambda: comm.all_reduce(x, 7))  # type: ignore[arg-type]
    refused(GroupError, "meta", call=lambda: comm.all_reduce(x.to("meta")))


def wrong_sizes() -> None:
    """Refused before anything is sent: the processes stay in step, as the sum at the end shows."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(2 * size + 1, 3)
    if size > 1:
        refused(ShapeError, f"multiple of {size} rows", "sizes", call=lambda: comm.reduce_scatter(x))
        refused(ShapeError, f"multiple of {size} rows", "send_sizes", call=lambda: comm.all_to_all(x))
    even = torch.ones(2 * size, 3)
    fits = [2] * size
    wrong = [2] * size + [0]
    for sizes in (wrong, [-1, 1, *fits][:size] if size > 1 else [-1]):
        refused(ShapeError, "row counts", call=lambda sizes=sizes: comm.reduce_scatter(even, sizes=sizes))
        refused(ShapeError, "row counts", call=lambda sizes=sizes: comm.all_gather(even, sizes=sizes))
    refused(ShapeError, "sum of sizes", call=lambda: comm.reduce_scatter(x, sizes=fits))
    refused(ShapeError, f"rank {rank}", call=lambda: comm.all_gather(torch.ones(3, 3), sizes=fits))
    refused(ShapeError, "send_sizes alone", call=lambda: comm.all_to_all(even, send_sizes=fits))
    refused(ShapeError, "sum of send_sizes", call=lambda: comm.all_to_all(x, send_sizes=fits, receive_sizes=fits))
    other = [1] * size
    refused(ShapeError, "to itself", call=lambda: comm.all_to_all(even, send_sizes=fits, receive_sizes=other))
    for op in (comm.reduce_scatter, comm.all_gather, comm.all_to_all):
        refused(ShapeError, "scalar", call=lambda op=op: op(torch.tensor(1.0)))
    refused(ShapeError, "out [2, 3] torch.float32", call=lambda: comm.reduce_scatter(even, out=torch.ones(3, 3)))
    refused(ShapeError, "out", call=lambda: comm.all_reduce(even, out=even.double()))
    refused(ShapeError, "out", call=lambda: comm.all_gather(even, out=torch.ones(2 * size * size, 3).int()))
    refused(ShapeError, "sum, max, min", call=lambda: comm.all_reduce(even, reduce="mean"))
    refused(ShapeError, "weight [hidden]", call=lambda: comm.all_reduce_add_rms_norm(even, even, torch.ones(2)))
    refused(ShapeError, "residual", call=lambda: comm.all_reduce_add_rms_norm(even, x, torch.ones(3)))
    refused(NoKernelError, "fp8_e4m3", call=lambda: comm.all_reduce(even.to(torch.float8_e4m3fn)))
    refused(NoKernelError, "no_such", call=lambda: comm.all_reduce(even, solution="no_such"))
    assert comm.all_reduce(torch.ones(1)).item() == size


def library_forms() -> None:
    """opcheck, and one graph without a break with the group given in each way."""
    size = dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    name, ops = world.group_name, torch.ops.tokenspeed
    x, weight = torch.randn(2 * size, 4), torch.ones(4)
    counts = [2] * size
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, arguments in (
        (ops.all_reduce, (x, name)),
        (ops.all_reduce, (x, name, "max", "reference")),
        (ops.reduce_scatter, (x, name)),
        (ops.reduce_scatter, (x, name, "sum", counts)),
        (ops.all_gather, (x, name)),
        (ops.all_to_all, (x, name)),
        (ops.all_to_all, (x, name, counts, counts)),
        (ops.all_reduce_add_rms_norm, (x, x, weight, name, 1e-5)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=utilities)

    for group in (name, world, None):

        def block(x: torch.Tensor, group: comm.Group = group) -> tuple[torch.Tensor, ...]:
            normed, total = comm.all_reduce_add_rms_norm(x, x, weight, group)
            share = comm.reduce_scatter(normed, group)
            return comm.all_gather(share, group), comm.all_to_all(total, group), comm.all_reduce(share, group, reduce="max")

        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        for mine, truth in zip(compiled(x), block(x), strict=True):
            assert torch.equal(mine, truth)


CHECKS: dict[str, Check] = {
    "arithmetic": arithmetic,
    "same bits everywhere": same_bits_everywhere,
    "integers": integers,
    "in place and strided outputs": in_place_and_strided_outputs,
    "fused equals separate": fused_equals_separate,
    "groups": groups,
    "wrong sizes": wrong_sizes,
    "library forms": library_forms,
}


def checks_of(world_size: int) -> dict[str, Check]:
    """The checks that a group of that size runs: compilers are slow to start, and what they are given does not grow with it."""
    return {name: check for name, check in CHECKS.items() if world_size <= 2 or check is not library_forms}


def _outcome(check: Check) -> str:
    try:
        check()
    except BaseException:  # noqa: BLE001 - whatever went wrong is the result
        return traceback.format_exc()
    return ""


def main(rank: int, world_size: int, folder: Path, backend: str = "gloo") -> None:
    """Run everything, and leave `<rank>.json`: what went wrong in each check, empty for nothing. With NCCL: the cases alone."""
    torch.set_num_threads(1)
    device = DEVICE
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    outcomes = {"before initialisation": _outcome(before_initialisation)}
    # A check that fails on one process alone leaves the others waiting: they give up, and what follows fails at once.
    patience = dt.timedelta(seconds=30)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size, timeout=patience)
    checks = checks_of(world_size) if backend == "gloo" else {}
    for name, check in checks.items():
        outcomes[name] = _outcome(check)
    for case in CASES:
        for dtype in DTYPES:
            outcomes[f"{case} {dtype}"] = _outcome(
                lambda case=case, dtype=dtype: check_case(case, solution="torch_distributed", device=device, dtype=dtype)
            )
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
