"""Text to token ids and back, one token at a time: the byte-level tokenizer of a checkpoint.

`tokenizer.json` comes in; ids and text go out. It must not know chat roles, prompts' templates or
requests; which id begins a sequence is the checkpoint's configuration and arrives as an argument.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from deepinfer.errors import CheckpointError, UsageError


class Tokenizer:
    """The tokenizer of a checkpoint.

    path: its `tokenizer.json`. bos_id: put in front of encoded text, exactly once; None for none.
    vocab_size: how many ids the model has; None: not checked. Raises CheckpointError if the file is
    not a byte-level tokenizer or makes ids that the model does not have.
    """

    def __init__(self, path: str | Path, bos_id: int | None, vocab_size: int | None = None) -> None:
        from tokenizers import Tokenizer as Encoder

        path = Path(path)
        try:
            spec = json.loads(path.read_text(encoding="utf-8"))
            added = {int(entry["id"]): entry for entry in spec.get("added_tokens") or ()}
            # Text typed by a user never turns into a special token: without the added ones the
            # encoder has nothing but its merges. Cutting and padding are not its business either.
            plain = dict(spec, added_tokens=[], post_processor=None, truncation=None, padding=None)
            self._encoder = Encoder.from_str(json.dumps(plain, ensure_ascii=False))
            strings = {int(token): text for text, token in spec["model"]["vocab"].items()}
            contents = {token: str(entry["content"]) for token, entry in added.items()}
        except Exception as problem:  # the library raises bare Exception for what it cannot read
            raise CheckpointError(
                "tokenizer-unreadable", f"{path.name} is not a tokenizer", [str(problem)]
            ) from None
        if not _is_byte_level(spec.get("decoder")):
            raise CheckpointError(
                "tokenizer-unsupported",
                f"{path.name} is not byte-level",
                [f"decoder: {(spec.get('decoder') or {}).get('type')}, needed: ByteLevel"],
            )
        highest = max((*strings, *contents), default=0)
        if vocab_size is not None and highest >= vocab_size:
            raise CheckpointError(
                "tokenizer-unsupported",
                f"{path.name} does not fit the model",
                [f"its ids reach to {highest}, the model's to {vocab_size - 1} (vocab_size)"],
                "put the tokenizer.json of this checkpoint beside its config.json",
            )
        self.bos_id = bos_id
        self._strings = strings
        self._added = contents
        self._special = {token for token, entry in added.items() if entry.get("special")}

    def encode(self, text: str) -> list[int]:
        """Ids of plain text with one BOS in front. Literals of special tokens stay ordinary text.

        Raises UsageError for text that has no UTF-8 form (a lone surrogate).
        """
        try:
            ids = self.encode_plain(text)
        except (TypeError, UnicodeError):
            raise UsageError(
                "prompt-not-text", "the prompt has half of a surrogate pair and is no valid text"
            ) from None
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def encode_plain(self, text: str) -> list[int]:
        """The same without BOS, for text that has a UTF-8 form."""
        return self._encoder.encode(text, add_special_tokens=False).ids

    @property
    def special_names(self) -> dict[int, str]:
        """Id of every special token, and how it is written."""
        return {token: self._added[token] for token in self._special}

    def special(self, text: str) -> int | None:
        """The id of a special token written so, which `encode` never makes of a text."""
        return next((i for i in self._special if self._added[i] == text), None)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens; what is not UTF-8 becomes U+FFFD."""
        stream = self.stream()
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text: b"" for special tokens and ids without a string."""
        if token in self._special:
            return b""
        if token in self._added:
            return self._added[token].encode()
        string = self._strings.get(token, "")
        try:
            return bytes(_BYTE_OF[character] for character in string)
        except KeyError:
            return string.encode()  # not written in the byte alphabet: it stands for itself


class Detokenizer:
    """Bytes of one sequence's tokens to text as they come.

    Bytes that may be the beginning of a character wait for the rest; `finish` flushes them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class StopText:
    """The text of one answer, cut before the first stop string.

    Text that could be the beginning of a stop string is held back until it is clear. Without a
    tokenizer there is no text. After a stop, `stopped` is True and nothing follows.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self._stream = tokenizer.stream() if tokenizer else None
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that is certain now. may_stop=False: a stop string does not count yet."""
        if self._stream is None:
            return ""
        return self._advance(self._stream.push(token), may_stop)

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        if self._stream is None or self.stopped:
            return ""
        text = self._held + self._stream.finish()
        self._held = ""
        return text

    def _advance(self, text: str, may_stop: bool) -> str:
        text = self._held + text
        starts = [at for stop in self._stop if (at := text.find(stop)) >= 0] if may_stop else []
        if starts:
            self.stopped = True
            self._held = ""
            return text[: min(starts)]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is not all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _is_byte_level(decoder: dict | None) -> bool:
    decoders = (decoder or {}).get("decoders") or [decoder or {}]
    return any(entry.get("type") == "ByteLevel" for entry in decoders)


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable Latin-1 bytes stand for themselves, the
    others, in order, for the characters from U+0100 on (the convention of GPT-2's vocabulary)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + at): byte for at, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
