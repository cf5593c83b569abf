"""The compressed vocabulary that the Engram tables hash (model spec section 3.4).

Tokens whose decoded text is equal after Unicode folding share one class. The text of a
`tokenizer.json` comes in, one class number per token id and the number of classes go out. This
module knows nothing of checkpoints, hashing or torch.
"""

from __future__ import annotations

_LONE_SPACE = "\ue000"  # keeps a token that is exactly one space from being stripped away


def compute_token_map(tokenizer_json_text: str) -> tuple[list[int], int]:
    """Class of every token id, and how many classes there are.

    For each id in order: text = decode([id]) with special tokens kept. If the text contains
    U+FFFD (an incomplete UTF-8 sequence) the key is the raw vocabulary string; otherwise it is the
    folded text, or the text itself where folding leaves nothing. Classes are numbered in
    first-seen order, so the list holds 0 at id 0 and never skips a number.

    Args:
        tokenizer_json_text: the contents of a Hugging Face `tokenizer.json`; only its own
            entries count, never placeholders added elsewhere.

    Returns:
        (classes [entries in the tokenizer], number of classes).

    Raises:
        ValueError: the text is not a tokenizer, or its ids have a gap.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.normalizers import (
        NFD,
        NFKC,
        Lowercase,
        Replace,
        Sequence,
        Strip,
        StripAccents,
    )

    try:
        tokenizer = Tokenizer.from_str(tokenizer_json_text)
    except Exception as error:  # the Rust library raises bare Exception
        raise ValueError(f"not a tokenizer.json: {error}") from error
    fold = Sequence(
        [
            NFKC(),
            NFD(),
            StripAccents(),
            Lowercase(),
            Replace(Regex(r"[ \t\r\n]+"), " "),
            Replace(Regex(r"^ $"), _LONE_SPACE),
            Strip(),
            Replace(_LONE_SPACE, " "),
        ]
    )
    classes: list[int] = []
    number_of: dict[str, int] = {}
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        raw = tokenizer.id_to_token(token_id)
        if raw is None:
            raise ValueError(f"tokenizer has no entry for id {token_id}")
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = raw if "\ufffd" in text else (fold.normalize_str(text) or text)
        classes.append(number_of.setdefault(key, len(number_of)))
    return classes, len(number_of)
