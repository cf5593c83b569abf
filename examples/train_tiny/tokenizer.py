"""The tiny model's byte-level BPE: special tokens, pre-tokenizer, training and encoding.

Owns the ids of the special tokens and the splitting rule. Plain text goes in, ids come out; text
can never produce a control token. It knows nothing of corpora, exercises or the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 4096

# Ids 0-18 in this order (tiny model config: bos 0, eos 1, pad 2, System 5 = draft noise, image 10).
SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜image｜>",
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
)
BOS, EOS, PAD, USER, ASSISTANT, SYSTEM, THINK, THINK_END, DSML = range(9)

# First match wins: word with one leading mark, single digit, newlines with the indentation that
# follows, punctuation run with an optional space, spaces (the last one stays with the next word).
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[\r\n]+[ \t]*| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+(?!\S)|\s+"
# The same rule for ASCII text in Python's `re`; used to cut text into cacheable pieces.
_ASCII_PIECE = re.compile(
    r"[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]|[\r\n]+[ \t]*| ?[^\sA-Za-z0-9]+|[^\S\r\n]+(?!\S)|\s+"
)


def train_bpe(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains the byte-level BPE: 19 specials, 256 bytes, the rest (3,821) merges."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if [tokenizer.token_to_id(s) for s in SPECIALS] != list(range(len(SPECIALS))):
        raise RuntimeError("special tokens did not get ids 0..18")
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(f"vocabulary has {tokenizer.get_vocab_size()} entries, not {vocab_size}")
    return tokenizer


def _byte_of_char() -> dict[str, int]:
    """Inverse of the byte-level alphabet: printable stand-in character -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    shifted = (b for b in range(256) if b not in set(plain))
    table.update({chr(256 + i): b for i, b in enumerate(shifted)})
    return table


class Vocabulary:
    """Encoding and decoding with a `tokenizer.json`; specials are never recognised in text."""

    def __init__(self, path: str | Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.encode_special_tokens = True
        chars = _byte_of_char()
        entries: list[bytes] = []
        for i in range(self.tokenizer.get_vocab_size()):
            token = self.tokenizer.id_to_token(i)
            entries.append(b"" if i < len(SPECIALS) else bytes(chars[c] for c in token))
        self.token_bytes = entries  # per id; b"" for a special token
        self._cache: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self.token_bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; equal to `tokenizer.encode` without special tokens."""
        if not text.isascii():
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        out: list[int] = []
        cache = self._cache
        for piece in _ASCII_PIECE.findall(text):
            ids = cache.get(piece)
            if ids is None:
                ids = tuple(self.tokenizer.encode(piece, add_special_tokens=False).ids)
                if len(cache) < 100_000:
                    cache[piece] = ids
            out += ids
        return out

    def encode_many(self, texts: list[str]) -> Iterator[list[int]]:
        """Ids of many texts, in order, on all cores."""
        for lo in range(0, len(texts), 256):
            batch = self.tokenizer.encode_batch_fast(texts[lo : lo + 256], add_special_tokens=False)
            yield from (e.ids for e in batch)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens spelled out; undecodable bytes become U+FFFD."""
        raw = b"".join(
            SPECIALS[i].encode() if i < len(SPECIALS) else self.token_bytes[i] for i in ids
        )
        return raw.decode("utf-8", errors="replace")


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Writes `tokenizer.json` compactly (the package ships it)."""
    spec = json.loads(tokenizer.to_str())
    path.write_text(json.dumps(spec, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
