"""AMX, which few machines have: its code is run with emulated tiles, and the compiled module is looked at for the real ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AVX512 = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx512vnni")


def test_instruction_sets_give_the_same_products() -> None:
    from tokenspeed_kernel_cpu import _kernels

    known = _kernels.instruction_sets()
    assert all(_kernels.give_same_products(name, known[-1]) for name in known)
    with pytest.raises(ValueError, match="got sse"):
        _kernels.give_same_products("sse", "avx2")


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_emulated_tiles_give_the_same_bits(repository: Path, tmp_path: Path, is_broken: bool) -> None:
    from tokenspeed_kernel_cpu import _kernels

    compiler = shutil.which("g++")
    if compiler is None or "avx512_vnni" not in _kernels.instruction_sets():
        pytest.skip("needs g++ and a processor with AVX512_VNNI")
    sources = repository / "plugins" / "tokenspeed_kernel_cpu" / "src" / "tokenspeed_kernel_cpu" / "csrc"
    emulation = (HERE / "amx_emulation.h").read_text()
    if is_broken:  # the comparison sees a wrong product
        emulation = emulation.replace("tiles[b].bytes[k][4 * n + i];", "tiles[b].bytes[k][4 * n + (i ^ 1)];")
    header = tmp_path / "emulation.h"
    header.write_text(emulation)
    common = [compiler, "-std=c++20", "-O1", "-ffp-contract=fast", "-Wno-maybe-uninitialized", f"-I{sources}", *AVX512]
    objects = []
    for name, table, more in (("vnni", "kAvx512Vnni", []), ("amx", "kAmx", ["-DTOKENSPEED_AMX", "-include", str(header)])):
        objects.append(str(tmp_path / f"{name}.o"))
        names = [f"-DTOKENSPEED_TABLE={table}", f'-DTOKENSPEED_NAME="{name}"']
        subprocess.run([*common, *names, *more, "-c", str(sources / "kernels.cpp"), "-o", objects[-1]], check=True)
    program = tmp_path / "compare"
    files = [str(HERE / "amx_main.cpp"), str(sources / "same_products.cpp")]
    subprocess.run([*common, *files, *objects, "-o", str(program)], check=True)
    assert subprocess.run([program], check=False).returncode == int(is_broken)


def test_the_module_has_tile_instructions() -> None:
    from tokenspeed_kernel_cpu import _kernels

    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("needs objdump")
    told = subprocess.run([objdump, "-d", _kernels.__file__], capture_output=True, text=True, check=True).stdout
    for instruction in ("tdpbsud", "ldtilecfg", "tileloadd", "tilestored", "tilerelease", "vpdpbusd"):
        assert instruction in told, instruction
