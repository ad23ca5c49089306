"""Our engine behind the same pipe as the peer's: scheduler and executor in one process. Run by `llama_cpp`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tokenspeed_engine.executor import OfflineEngine
from tokenspeed_engine.types import ProcessMemory, SamplingParams

BATCH = 512


class Ours:
    """The engine with room for so many streams and tokens."""

    def __init__(self, path: str, threads: int, streams: int, tokens: int, options: dict[str, Any]) -> None:
        self.imported_bytes = ProcessMemory.now().resident_bytes
        self._engine = OfflineEngine(
            path,
            device="cpu",
            num_threads=threads,
            num_pages=tokens // 16,
            max_model_len=tokens,
            max_num_seqs=streams,
            max_num_batched_tokens=BATCH,
            enable_prefix_caching=False,
            **options,
        )
        self.name = f"weights {self._engine.executor.weights}"

    def run(self, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        """As the peer's."""
        engine = self._engine
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        start = time.perf_counter()
        outputs = [engine.submit(prompt, params) for prompt in prompts]
        while not all(output.token_ids for output in outputs):
            engine.step()
        prefilled = time.perf_counter()
        # Streams whose prompt was done earlier have gone on: only what is still to come is timed.
        early = sum(len(output.token_ids) - 1 for output in outputs)
        while engine.has_work():
            engine.step()
        done = time.perf_counter()
        texts = [output.token_ids for output in outputs]
        share = (num_new - 1) * len(prompts) - early
        scale = (num_new - 1) * len(prompts) / share if share else 1.0
        return {"prefill_s": prefilled - start, "decode_s": (done - prefilled) * scale, "texts": texts}

    def memory(self) -> dict[str, Any]:
        """What is held by name, and what the process holds."""
        executor = self._engine.executor
        sizes = {"weights": executor.weights_bytes, "KV": executor.kv_cache_bytes}
        resident = ProcessMemory.now().resident_bytes
        return {"buffers": sizes, "resident_bytes": resident, "imported_bytes": self.imported_bytes}


def main() -> None:
    """Serve until the pipe is closed."""
    first = json.loads(sys.stdin.readline())
    ours = Ours(first["path"], first["threads"], first["streams"], first["tokens"], first["options"])
    print(json.dumps({"name": ours.name}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = ours.memory() if command["do"] == "memory" else ours.run(command["prompts"], command["num_new"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
