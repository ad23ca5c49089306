"""One rank of a tensor-parallel run: argv = rank, world size, port, checkpoint folder, file for the result."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from tokenspeed_engine.checkpoint import open_checkpoint
from tokenspeed_engine.executor import load_model
from tokenspeed_engine.kvcache import KVLayout, KVPool
from tokenspeed_engine.layers import DecodeRows, ExtendRows, ForwardBatch
from tokenspeed_engine.parallel import Mesh

PAGE = 16
NUM_NEW = 12


@torch.inference_mode()
def main() -> None:
    """Load this rank's share, prefill a prompt, decode greedily; rank 0 saves logits and ids."""
    rank, size, port, folder, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    mesh = Mesh.of_world()
    assert (mesh.size, mesh.rank) == (size, rank)
    device = torch.device("cpu")
    model = load_model(open_checkpoint(folder), max_model_len=128, device=device, dtype=torch.float32, mesh=mesh).model
    config = model.config
    kv = KVPool(KVLayout(config.num_layers, config.num_kv_heads // size, config.head_dim, PAGE, torch.float32), 8, device)
    table = torch.arange(8, dtype=torch.int32).view(1, 8)
    tokens = torch.arange(3, 40, dtype=torch.int32)
    n = len(tokens)
    extend = ExtendRows(1, n, table, torch.tensor([0, n], dtype=torch.int32), torch.tensor([n], dtype=torch.int32), n, n, PAGE)
    positions = torch.arange(n, dtype=torch.int32)
    batch = ForwardBatch(n, tokens, positions, positions.long(), None, None, extend)
    steps = [model.logits(model.forward(batch, kv))]
    ids = [int(steps[0][-1].argmax())]
    while len(ids) < NUM_NEW:
        at = torch.tensor([n], dtype=torch.int32)
        n += 1
        decode = DecodeRows(1, table, torch.tensor([n], dtype=torch.int32), n, PAGE)
        batch = ForwardBatch(1, torch.tensor(ids[-1:], dtype=torch.int32), at, at.long(), None, decode, None)
        steps.append(model.logits(model.forward(batch, kv)))
        ids.append(int(steps[-1][-1].argmax()))
    if rank == 0:
        torch.save({"logits": torch.cat(steps), "ids": ids}, result)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
