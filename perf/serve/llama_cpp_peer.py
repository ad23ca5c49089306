"""llama.cpp behind a pipe: a JSON command a line, a JSON answer a line. Run by `llama_cpp`, in an interpreter of its own.

It needs llama_cpp and numpy alone. Its batches are those that llama.cpp's server makes: prompts in one batch of up to 512 tokens,
one token of each stream in a step, greedy tokens taken from the logits where they lie.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import re
import sys
import time
from typing import Any

BATCH = 512


def resident_bytes() -> int:
    """Physical memory of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


class Peer:
    """A model and a context for several streams.

    Args:
        path: the GGUF file.
        threads: for everything.
        streams: sequences that share the context.
        tokens: room of all sequences together.
    """

    def __init__(self, path: str, threads: int, streams: int, tokens: int) -> None:
        self.imported_bytes = resident_bytes()
        import llama_cpp
        import numpy as np

        self._lib, self._np = llama_cpp, np
        self._log = ""
        # The log alone tells how large the buffers are. The callback must outlive the library.
        self._callback = llama_cpp.llama_log_callback(self._keep)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))
        self.imported_bytes = resident_bytes()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = tokens, BATCH, BATCH, streams
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True  # any sequence may use the whole room
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._model or not self._context:
            raise RuntimeError(self._log[-2000:])
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def _keep(self, level: int, text: bytes, data: Any) -> None:
        self._log += text.decode("utf-8", "replace")

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, stream, whether its logits are wanted)."""
        batch = self._batch
        for index, (token, position, stream, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
        batch.n_tokens = len(rows)
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}\n{self._log[-2000:]}")

    def _best(self, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(self._np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def run(self, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        """Prefill the prompts, then decode them together; returns the seconds of both, and the tokens."""
        lib = self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        start = time.perf_counter()
        rows = [
            (token, at, stream, at == len(prompt) - 1)
            for stream, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        tokens = [0] * len(prompts)
        for first in range(0, len(rows), BATCH):
            part = rows[first : first + BATCH]
            self._decode(part)
            for index, (_, _, stream, wanted) in enumerate(part):
                if wanted:
                    tokens[stream] = self._best(index)
        prefilled = time.perf_counter()
        texts = [[token] for token in tokens]
        for step in range(num_new - 1):
            self._decode([(text[-1], len(prompts[i]) + step, i, True) for i, text in enumerate(texts)])
            for row, text in enumerate(texts):
                text.append(self._best(row))
        done = time.perf_counter()
        return {"prefill_s": prefilled - start, "decode_s": done - prefilled, "texts": texts}

    def memory(self) -> dict[str, Any]:
        """Sizes of the buffers that it logged, and what the process holds."""
        found = re.findall(r"(\w+(?: \w+)*) buffer size =\s+([\d.]+) MiB", self._log)
        buffers = [(name, float(size) * 2**20) for name, size in found]
        return {
            "buffers": dict(buffers),
            "declared_bytes": sum(size for _, size in buffers),
            "resident_bytes": resident_bytes(),
            "imported_bytes": self.imported_bytes,
        }


def main() -> None:
    """Serve until the pipe is closed."""
    first = json.loads(sys.stdin.readline())
    peer = Peer(first["path"], first["threads"], first["streams"], first["tokens"])
    print(json.dumps({"name": f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = peer.memory() if command["do"] == "memory" else peer.run(command["prompts"], command["num_new"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
