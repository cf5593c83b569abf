"""Builds everything the training machine needs, from the package index to packed token streams.

One command, `python examples/train_tiny/prepare.py`: corpus, tokenizer, token map, streams, xz
parts and the figures for the model card, all in the work folder. Finished stages are kept; delete
their files to redo them. It knows nothing of the model beyond the vocabulary.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepinfer.tokenizer.token_map import compute_token_map  # noqa: E402
from examples.train_tiny import corpus, exercises, streams, tokenizer  # noqa: E402


def build_tokenizer(work: Path) -> None:
    """Trains on the library without tests, 14 MB of packages and 12,000 exercises."""
    rng = random.Random("tokenizer")
    texts = corpus.read_archive(work / "core.txt")
    packages = corpus.read_archive(work / "packages.txt")
    rng.shuffle(packages)
    size = 0
    for text in packages:
        size += len(text)
        if size > 14_000_000:
            break
        texts.append(text)
    texts += exercises.tokenizer_texts(rng, streams.load_docs(work), 12_000)
    tokenizer.save(tokenizer.train_bpe(texts), work / "tokenizer.json")


def build_streams(work: Path) -> dict[str, dict[str, float]]:
    """Encodes the archives; returns ids and bytes per id of each."""
    vocabulary = tokenizer.Vocabulary(work / "tokenizer.json")
    figures = {}
    for name in streams.STREAMS:
        texts = corpus.read_archive(work / f"{name}.txt")
        ids = streams.write_stream(work / f"{name}.bin", vocabulary, texts)
        size = sum(len(t.encode()) for t in texts)
        figures[name] = {"tokens": ids, "bytes": size, "bytes_per_token": round(size / ids, 3)}
    return figures


def main(work: Path = corpus.WORK) -> None:
    """Runs the stages and writes `data.json`, the figures for the model card."""

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    start = time.perf_counter()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "corpus.json").exists():
        corpus.collect(work)
    counts = json.loads((work / "corpus.json").read_text(encoding="utf-8"))
    say("corpus: " + ", ".join(f"{n} {counts[n]['bytes'] / 1e6:.1f} MB" for n in streams.STREAMS))
    if not (work / "tokenizer.json").exists():
        build_tokenizer(work)
    classes, n = compute_token_map((work / "tokenizer.json").read_text(encoding="utf-8"))
    (work / "engram_token_map.json").write_text(json.dumps(classes), encoding="utf-8")
    say(f"tokenizer: {len(classes)} entries, {n} classes in the token map")
    figures = build_streams(work)
    for name, f in figures.items():
        say(f"{name}: {f['tokens'] / 1e6:.2f} M tokens, {f['bytes_per_token']} bytes a token")
    files = streams.pack(work)
    packed = sum(f.stat().st_size for f in files)
    say(f"packed: {len(files)} files, {packed / 1e6:.1f} MB")
    data = {"corpus": counts, "streams": figures, "token_map_classes": n, "packed_bytes": packed}
    (work / "data.json").write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
