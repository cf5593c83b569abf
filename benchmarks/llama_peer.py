"""llama.cpp decoding beside `native ceiling`: started with the peer's own Python, not with ours.

Comes in: a folder, the bytes a token should touch, threads. A Llama model of random Q8_0 weights of
that size is written there with `gguf`; then every line on stdin decodes so many tokens and answers
with the seconds of each. Source of the file layout: the gguf package.

    pip install llama-cpp-python gguf numpy          # in an environment of its own
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

HIDDEN, HEADS, VOCAB, LAYERS = 2048, 16, 4096, 6
BLOCK, BYTES = 32, 34  # Q8_0: a float16 scale and 32 codes


def write(path: Path, touched: int) -> int:
    """The model; returns the bytes of its matrices that one token reads."""
    import gguf
    import numpy as np

    def q8(rows: int, cols: int) -> np.ndarray:
        data = draw.integers(0, 256, (rows, cols // BLOCK, BYTES), dtype=np.uint8)
        data[..., :2] = np.array([2e-4], dtype=np.float16).view(np.uint8)
        return data.reshape(rows, -1)

    draw = np.random.default_rng(0)
    attention, head = 4 * HIDDEN * HIDDEN, VOCAB * HIDDEN
    left = touched * BLOCK / BYTES - head - LAYERS * attention
    inner = max(BLOCK, round(left / (3 * HIDDEN * LAYERS) / BLOCK) * BLOCK)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("no_vocab")
    total = 0

    def matrix(name: str, rows: int, cols: int, read: bool = True) -> None:
        nonlocal total
        data = q8(rows, cols)
        total += data.nbytes if read else 0
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(HIDDEN, dtype=np.float32))

    matrix("token_embd.weight", VOCAB, HIDDEN, read=False)
    norm("output_norm.weight")
    matrix("output.weight", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{name}.weight", HIDDEN, HIDDEN)
        matrix(f"blk.{layer}.ffn_gate.weight", inner, HIDDEN)
        matrix(f"blk.{layer}.ffn_up.weight", inner, HIDDEN)
        matrix(f"blk.{layer}.ffn_down.weight", HIDDEN, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def main() -> int:
    import llama_cpp

    folder, touched, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    file = folder / "llama.gguf"
    read = write(file, touched)
    model = llama_cpp.Llama(
        str(file), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    print(read, llama_cpp.__version__, flush=True)
    for line in sys.stdin:
        model.reset()
        model.eval([7] * 16)
        start = time.perf_counter()
        for token in range(int(line)):
            model.eval([11 + token])
        print((time.perf_counter() - start) / int(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
