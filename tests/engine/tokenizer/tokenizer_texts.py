"""Texts on which tokenizers tend to differ, and a generator of more."""

from __future__ import annotations

import random

TEXTS = {
    "empty": "",
    "ascii": "The capital of France is Paris.",
    "digits": "0 1 12 123 1234 12345 3.14159 1,000,000 0x1F 2026-11-30 v1.2.3",
    "digits_unicode": "x² ½ Ⅷ ٣٤٥ ७८ １２３ 一二三",
    "contractions": "I'm you're he'd we'll they've it's don't I'M YOU'RE 'tis o'clock s's",
    "cjk": "你好，世界！今天天气很好。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "cjk_mixed": "用Python写code，版本3.11。テスト123件",
    "emoji": "😀😃 🌶️ 👍🏽 ❤️ 🇫🇷🇩🇪",
    "emoji_joined": "👩‍👩‍👧‍👦 👨🏾‍💻 🏳️‍🌈 🧑‍🚀x🧑‍🚀",
    "spaces": "a b  c   d    e     f        g                h",
    "spaces_ends": "   leading and trailing   ",
    "newlines": "a\nb\n\nc\n\n\nd\r\ne\r\n\r\nf\n \n  \n\t\n",
    "tabs": "\tif x:\n\t\treturn\t1\n\t \t",
    "unicode_spaces": "a\u00a0b\u2003c\u3000d\u200be\ufefff\u2028g\u0085h",
    "python": 'def f(x: int = 0) -> str:\n    """Doc."""\n    return f"{x:>8}" if x != 1_000 else \'\'\n',
    "c": '#include <stdio.h>\nint main(void){for(int i=0;i<10;++i){printf("%d\\n",a[i]->b);}return 0;}\n',
    "json": '{"a": [1, 2.5e-3, null, true], "b\\u00e9": {"c": "d\\n"}}',
    "shell": "$ ls -la ~/dir && cat file.txt | grep -E '^[a-z]+$' > /dev/null 2>&1; echo $?\n",
    "latin": "Ça va? Naïve façade, Straße, Œuvre, ÀÉÎÕÜ, İstanbul ǅ",
    "combining": "e\u0301 n\u0303 a\u030a\u0323 हिन्दी ภาษาไทย தமிழ்",
    "cased": "camelCase PascalCase SCREAMING_CASE HTTPServer iPhone XMLHttpRequest ABCdef",
    "rtl": "שלום עולם مرحبا بالعالم",
    "cyrillic_greek": "Привет, мир! Γειά σου Κόσμε ΑΒΓ",
    "punctuation": "...!!!???---___***///\\\\\\ <<>> [[]] (()) «» “” ‘’ — – … ¿¡ ~`@#$%^&*+=|",
    "symbols": "∑∫√∞≠≤≥ ←→↑↓ €£¥₿ ©®™ ½¾ ♠♣♥♦ 𝒜𝔅ℂ",
    "private_and_rare": "\ue000\U000f0000\U0010fffd\ufffd 𠀀𪜶 𐍈 𓀀",
    "controls": "a\x00b\x01c\x04d\x06\x13\x14\x16\x1d\x1be\x7ff",
    "missing_bytes": "!\x04! .\x06. -\x13- =\x14= *\U000f0000* (\x16) #\x1d#",
    "specials": "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <repo_name>x <|im_start |>",
    "long_word": "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 3,
    "repeated": "a" * 100 + " " * 100 + "ab" * 50 + "\n" * 50,
    "url": "https://example.org:8080/a/b?c=d&e=%20f#g user@example.org C:\\dir\\file.txt",
}

_POOLS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    " " * 6 + "\n\t\r",
    ".,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+`~",
    "éüßñçøåÆŒĲǅ",
    "你好世界的一是在不了有和人这中大",
    "ひらがなカタカナ한국어",
    "😀🌶👩👨👧🚀🏳🏽",
    "\u200d\ufe0f\u0301\u0308\u20e3",
    "½²³٣७Ⅷ１",
    "\u00a0\u2003\u3000\u200b\u2028\u0085\u1680\u180e",
    "∑∫€™«»“”…",
    "مرحباשלוםПриветभाषा",
    "\x00\x01\x04\x1b\x7f\U0010fffd\ue000𠀀",
)
_WORDS = ("'s", "'ll", " 'RE", "  ", "\n\n", "\r\n", "def ", "return", "<|im_end|>", "<|im_start|>", " the", "1234", "    ")


def random_text(generator: random.Random, longest: int = 120) -> str:
    """Runs from one pool after another: where two kinds of character meet is where pre-tokenizers differ."""
    parts: list[str] = []
    length = generator.randint(1, longest)
    while sum(map(len, parts)) < length:
        if generator.random() < 0.2:
            parts.append(generator.choice(_WORDS))
        else:
            pool = generator.choice(_POOLS)
            parts.append("".join(generator.choices(pool, k=generator.randint(1, 8))))
    return "".join(parts)
