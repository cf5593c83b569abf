"""Text and token ids: the tokenizer of a checkpoint and the vocabulary classes Engram hashes."""
