"""Which tokenizer and chat template to use: the stage of text and token ids."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_engine.config.fields import option


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer, where it is not the model's own.

    Attributes:
        tokenizer: Hugging Face id, folder or file; empty means the model's.
        chat_template: a file with a Jinja template, or the template itself; empty means the model's.
    """

    tokenizer: str = option("", "--tokenizer", parse=str, help="another tokenizer: Hugging Face id, folder or file", metavar="PATH")
    chat_template: str = option(
        "", "--chat-template", parse=str, help="a Jinja chat template, or a file that holds one", metavar="TEMPLATE"
    )
