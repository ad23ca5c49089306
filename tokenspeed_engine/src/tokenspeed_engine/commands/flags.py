"""Flags of the commands, beside those of the configuration; imports nothing heavy."""

from __future__ import annotations

import argparse


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `generate`."""
    group = parser.add_argument_group("generation")
    group.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; without any, standard input is one prompt")
    group.add_argument("--model", default="", help="Hugging Face id, folder or file (default: the default model)")
    group.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    group.add_argument("--system", default="", help="system message of the chat")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most new tokens (default: 256)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, help="share of probability that is kept (default: 1)")
    group.add_argument("--stop", action="append", default=[], help="string that ends the text; may be repeated")
    group.add_argument("--json", action="store_true", help="one JSON object a prompt, with token ids")


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench`."""
    group = parser.add_argument_group("load")
    group.add_argument("--url", default="", help="server to measure, such as http://127.0.0.1:8000 (default: start one)")
    group.add_argument("--model", default="", help="model of the server that is started (default: the default model)")
    group.add_argument("--num-prompts", type=int, default=32, metavar="N", help="requests in all (default: 32)")
    group.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests at the same time (default: 8)")
    group.add_argument("--input-len", type=int, default=128, metavar="TOKENS", help="tokens of a prompt (default: 128)")
    group.add_argument("--output-len", type=int, default=32, metavar="TOKENS", help="tokens of an answer (default: 32)")
    group.add_argument("--prefix-len", type=int, default=0, metavar="TOKENS", help="of these, the same in all prompts")
    group.add_argument("--bench-seed", type=int, default=0, metavar="SEED", help="seed of the prompts")
    group.add_argument("--json", action="store_true", help="print JSON in place of a table")
