"""Matrices that stay quantized: what is kept, how pieces are stacked and shared out, and that it computes the same."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch

from tokenspeed_engine.checkpoint import GgufCheckpoint, open_checkpoint
from tokenspeed_engine.checkpoint.gguf_quants import FORMATS, dequantize
from tokenspeed_engine.executor import LoadedModel, load_model
from tokenspeed_engine.kvcache import KVLayout, KVPool
from tokenspeed_engine.layers import ExtendRows, ForwardBatch
from tokenspeed_engine.models import build_model
from tokenspeed_engine.parallel import Mesh, Parameter
from tokenspeed_engine.weights import WeightsError, load_weights
from tokenspeed_kernel import QuantizedTensor, dispatch

CPU = torch.device("cpu")
KINDS = {name: getattr(gguf.GGMLQuantizationType, name) for name in ("Q4_0", "Q4_1", "Q8_0")}


@pytest.fixture(scope="session")
def gguf_files() -> ModuleType:
    """The checkpoint tests' writer of small files."""
    name = "tests_engine_checkpoint_gguf_files"
    if name not in sys.modules:
        path = Path(__file__).parent.parent / "checkpoint" / "gguf_files.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the kernels of the kernel package itself, which never round activations."""
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "all")
    dispatch.reset()
    yield
    monkeypatch.undo()
    dispatch.reset()


def _file(
    files: ModuleType, folder: Path, kinds: dict[str, str], arch: str = "llama", default: str | None = "Q4_1"
) -> GgufCheckpoint:
    """A file whose matrices have the kinds given by the end of their names (of the form `v_proj`), else the default."""
    values = {name: value * 0.2 for name, value in files.tensors(arch, np.random.default_rng(1)).items()}
    chosen = {}
    for name, value in values.items():
        kind = next((kinds[part] for part in kinds if f"{part}.weight" in name), default)
        if value.ndim == 2 and kind in KINDS:
            chosen[name] = KINDS[kind]
    return open_checkpoint(files.write(folder / "m.gguf", arch, values, kinds=chosen))  # type: ignore[return-value]


def _parameters(
    checkpoint: GgufCheckpoint, mesh: Mesh | None = None
) -> tuple[dict[str, Parameter], dict[str, int], tuple[str, ...]]:
    model = build_model(checkpoint.config)
    weights = {key: names for key, names in model.weight_map().items() if key != "head.weight"}
    parameters = {key: value for key, value in model.named_parameters() if key != "head.weight"}
    report = load_weights(
        parameters, weights, checkpoint, device=CPU, dtype=torch.float32, mesh=mesh, keep=lambda stored: stored != "Q8_0"
    )
    return parameters, report.kept_bytes, report.dequantized_formats


def _plain(part: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        return part
    kind = next(one for one in FORMATS.values() if f"gguf_{one.name.lower()}" == part.format.logical)
    return dequantize(part.data.reshape(-1), kind).view(part.shape)


@torch.inference_mode()
def _logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Logits of every position of one prompt."""
    config = loaded.model.config
    pool = KVPool(KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32), 8, CPU)
    count = len(ids)
    pages = torch.arange(8, dtype=torch.int32)[None]
    lengths = torch.tensor([count], dtype=torch.int32)
    batch = ForwardBatch(
        num_tokens=count,
        token_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.arange(count, dtype=torch.int32),
        slot_mapping=torch.arange(count),
        output_rows=None,
        decode=None,
        extend=ExtendRows(1, count, pages, torch.tensor([0, count], dtype=torch.int32), lengths, count, count, 16),
    )
    return loaded.model.logits(loaded.model.forward(batch, pool))


def _load(checkpoint: GgufCheckpoint, quantization: str) -> LoadedModel:
    return load_model(checkpoint, max_model_len=64, device=CPU, dtype=torch.float32, quantization=quantization)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_rows_are_those_that_are_read(kind: str, gguf_files: ModuleType, tmp_path: Path) -> None:
    """Also of llama's q and k, whose rows the file has in another order."""
    checkpoint = _file(gguf_files, tmp_path, {}, default=kind)
    for name in checkpoint.names():
        if len(checkpoint.shape(name)) == 1:
            assert checkpoint.stored_format(name) is None
            continue
        assert checkpoint.stored_format(name) == kind
        stored = checkpoint.read_stored(name)
        facts = next(one for one in FORMATS.values() if one.name == kind)
        assert (stored.block_elements, stored.block_bytes) == (facts.block_elements, facts.block_bytes)
        plain = dequantize(stored.data.reshape(-1), facts).view(checkpoint.shape(name))
        assert torch.equal(plain, checkpoint.read(name)), name


def test_plain_tensors_have_no_blocks(gguf_files: ModuleType, tmp_path: Path) -> None:
    checkpoint = _file(gguf_files, tmp_path, {}, default=None)
    assert all(checkpoint.stored_format(name) is None for name in checkpoint.names())
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is not stored in blocks"):
        checkpoint.read_stored("model.norm.weight")


def test_pieces_of_one_format_are_one_matrix(gguf_files: ModuleType, tmp_path: Path) -> None:
    checkpoint = _file(gguf_files, tmp_path, {})
    parameters, kept, dequantized = _parameters(checkpoint)
    (qkv,) = parameters["layers.0.attention.qkv.weight"].parts()
    assert isinstance(qkv, QuantizedTensor)
    assert (str(qkv.format), qkv.shape) == ("gguf_q4_1@inline", (64, 32))
    names = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkv"]
    assert torch.equal(_plain(qkv), torch.cat([checkpoint.read(name) for name in names]))
    assert kept == {"Q4_1": sum(checkpoint.size_bytes(name) for name in checkpoint.names() if len(checkpoint.shape(name)) == 2)}
    assert dequantized == ()
    # Norms are vectors: they stay plain.
    assert parameters["norm.weight"].tensor().dtype is torch.float32


def test_pieces_of_different_formats_are_parts(gguf_files: ModuleType, tmp_path: Path) -> None:
    """Neighbours of one format together; a format that is not kept becomes a plain part."""
    checkpoint = _file(gguf_files, tmp_path, {"k_proj": "Q4_0", "v_proj": "Q8_0", "up_proj": "Q4_0", "gate_proj": "F32"})
    parameters, kept, dequantized = _parameters(checkpoint)
    found = {
        key: [str(one.format) if isinstance(one, QuantizedTensor) else str(one.dtype) for one in parameters[key].parts()]
        for key in ("layers.1.attention.qkv.weight", "layers.1.mlp.gate_up.weight")
    }
    assert found == {
        "layers.1.attention.qkv.weight": ["gguf_q4_1@inline", "gguf_q4_0@inline", "torch.float32"],
        "layers.1.mlp.gate_up.weight": ["torch.float32", "gguf_q4_0@inline"],
    }
    names = [f"model.layers.1.self_attn.{one}_proj.weight" for one in "qkv"]
    whole = torch.cat([_plain(part) for part in parameters["layers.1.attention.qkv.weight"].parts()])
    assert torch.equal(whole, torch.cat([checkpoint.read(name) for name in names]))
    assert set(kept) == {"Q4_0", "Q4_1"}
    assert dequantized == ("Q8_0",)
    with pytest.raises(ValueError, match="too many values"):
        parameters["layers.1.attention.qkv.weight"].tensor()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_keeps_its_share(rank: int, gguf_files: ModuleType, tmp_path: Path) -> None:
    """Rows of each piece; columns where a rank's are whole blocks (64 of `down`), else they are dequantized (32 of `out`)."""
    checkpoint = _file(gguf_files, tmp_path, {})
    parameters, _, dequantized = _parameters(checkpoint, Mesh(2, rank, group=object()))
    (gate_up,) = parameters["layers.0.mlp.gate_up.weight"].parts()
    assert isinstance(gate_up, QuantizedTensor)
    read = {one: checkpoint.read(f"model.layers.0.mlp.{one}_proj.weight") for one in ("gate", "up", "down")}
    rows = slice(32 * rank, 32 * rank + 32)
    assert torch.equal(_plain(gate_up), torch.cat((read["gate"][rows], read["up"][rows])))
    (down,) = parameters["layers.0.mlp.down.weight"].parts()
    assert isinstance(down, QuantizedTensor)
    assert torch.equal(_plain(down), read["down"][:, rows])
    out = parameters["layers.0.attention.out.weight"].tensor()
    whole = checkpoint.read("model.layers.0.self_attn.o_proj.weight")
    assert torch.equal(out, whole[:, 16 * rank : 16 * rank + 16])
    assert dequantized == ("Q4_1",)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("kinds", [{}, {"k_proj": "Q4_0", "v_proj": "Q8_0", "up_proj": "Q4_0"}], ids=["one kind", "mixed"])
def test_logits_are_those_of_dequantized_weights(
    kinds: dict[str, str], arch: str, gguf_files: ModuleType, tmp_path: Path, without_plugins: None
) -> None:
    """To rounding, where no kernel rounds activations; qwen2's fused projection has a bias, which parts share out."""
    checkpoint = _file(gguf_files, tmp_path, {**kinds, "embed_tokens": "Q8_0"}, arch)
    kept, plain = (_load(checkpoint, quantization) for quantization in ("gguf", "none"))
    assert kept.size_bytes < plain.size_bytes / 3
    ids = [3, 9, 27, 39, 1, 0, 5]
    torch.testing.assert_close(_logits(kept, ids), _logits(plain, ids), rtol=1e-4, atol=1e-4)
    assert kept.weights == ("Q4_0 and Q4_1 and Q8_0 as in the file" if kinds else "Q4_1 and Q8_0 as in the file")
    assert plain.weights.startswith("float32, dequantized from ")


def test_auto_dequantizes_without_a_kernel_made_for_the_format(
    gguf_files: ModuleType, tmp_path: Path, without_plugins: None
) -> None:
    checkpoint = _file(gguf_files, tmp_path, {})
    loaded = _load(checkpoint, "auto")
    assert loaded.report.kept_bytes == {}
    assert loaded.weights == "float32, dequantized from Q4_1"
    assert torch.equal(_logits(loaded, [1, 2, 3]), _logits(_load(checkpoint, "none"), [1, 2, 3]))


def test_a_tied_embedding_is_kept_once(gguf_files: ModuleType, tmp_path: Path) -> None:
    """Looking up and the head read the same blocks, where the head's kernel can."""
    pytest.importorskip("tokenspeed_kernel_cpu", reason="needs the plugin tokenspeed-kernel-cpu")
    loaded = _load(_file(gguf_files, tmp_path, {"embed_tokens": "Q8_0"}), "gguf")
    embed, head = loaded.model.embed._weight, loaded.model.head._packed.data
    assert isinstance(embed, QuantizedTensor)
    assert [one.data_ptr() for one in head.owners] == [embed.data.data_ptr()]
    counted = sum(loaded.report.kept_bytes.values())
    assert loaded.size_bytes == counted + sum(p.numel() * 4 for p in _vectors(loaded))


def _vectors(loaded: LoadedModel) -> list[torch.Tensor]:
    return [parameter.tensor() for _, parameter in loaded.model.named_parameters() if len(parameter.shape) == 1]


def test_gguf_is_refused_for_other_files(tmp_path: Path, tiny: ModuleType) -> None:
    tiny.make("llama", tmp_path)
    with pytest.raises(WeightsError, match=r"--quantization gguf: .* is no GGUF file\. Fix: use --quantization auto"):
        load_model(open_checkpoint(tmp_path), max_model_len=64, device=CPU, dtype=torch.float32, quantization="gguf")
    for quantization in ("auto", "none"):
        loaded = load_model(open_checkpoint(tmp_path), max_model_len=64, device=CPU, dtype=torch.float32, quantization=quantization)
        assert loaded.weights == "float32"
