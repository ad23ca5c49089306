"""A front end that starts a scripted core, prints its pid and socket directory, and runs one endless request."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tokenspeed_engine.checkpoint import default_model_path
from tokenspeed_engine.client import CoreClient
from tokenspeed_engine.config import CoreConfig, ModelConfig
from tokenspeed_engine.metrics import EngineMetrics
from tokenspeed_engine.supervisor import CoreSupervisor
from tokenspeed_engine.tokenizer import load_tokenizer
from tokenspeed_engine.types import SamplingParams, TokenizedRequest


async def main() -> None:
    client = CoreClient(EngineMetrics(), max_requests=8)
    client.set_tokenizer(load_tokenizer(default_model_path()))
    config = CoreConfig(model=ModelConfig(model=sys.argv[1], max_model_len=512))
    command = (sys.executable, "-P", str(Path(__file__).with_name("scripted_core.py")))
    supervisor = CoreSupervisor(config, client, command=command)
    client.attach(supervisor.send)
    await supervisor.start()
    await client.ready.wait()
    prompt = tuple(int(word) for word in sys.argv[2:])
    async for _ in client.generate(TokenizedRequest("r", prompt, SamplingParams(max_tokens=400))):
        print(supervisor.core_pid, supervisor.runtime_directory, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
