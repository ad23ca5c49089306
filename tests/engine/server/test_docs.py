"""docs/openai_api.md names every field that the server knows or refuses, and every neutral value's parameter."""

from __future__ import annotations

import re
from pathlib import Path

from tokenspeed_engine.server.protocol import ChatCompletionRequest, CompletionRequest
from tokenspeed_engine.server.refused import CHAT, COMPLETIONS


def test_every_field_is_documented(repository: Path) -> None:
    text = (repository / "docs" / "openai_api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:messages\[\]\.)?([a-z_]+)(?:\.[a-z_]+)?(?:: 0)?`", text))
    fields = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *CHAT, *COMPLETIONS}
    assert fields - named == set()


def test_refused_fields_stand_in_the_row_of_their_endpoint(repository: Path) -> None:
    text = (repository / "docs" / "openai_api.md").read_text(encoding="utf-8")
    section = text.split("## Refused until they exist")[1].split("\n## ")[0]
    rows = {row.split("|")[1].strip(): set(re.findall(r"`([a-z_]+)`", row)) for row in section.splitlines() if row.startswith("| ")}
    assert rows["both"] | rows["chat"] == set(CHAT)
    assert rows["both"] | rows["completions"] == set(COMPLETIONS)
