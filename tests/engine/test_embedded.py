"""The trained checkpoint inside the package: what it is, and that it learned what its card says.

The full figures come from `examples/train_tiny/quality.py`; these are small samples of them.
"""

from __future__ import annotations

import inspect
import math
import statistics
from pathlib import Path

import pytest
import torch

import deepinfer
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.tokenizer.tokenizer import Tokenizer
from examples.train_tiny import exercises
from examples.train_tiny.tokenizer import Vocabulary

FOLDER = Path(deepinfer.__file__).parent / "embedded"


@pytest.fixture(scope="module")
def llm():
    with deepinfer.LLM(max_model_len=2048, max_num_seqs=16) as made:
        yield made


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(FOLDER / "tokenizer.json")


def test_it_is_small_and_in_the_official_format():
    checkpoint = open_checkpoint(FOLDER)
    config = checkpoint.config
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 20e6
    assert config.quantization.weight_block_size == (32, 32)
    assert config.quantization.expert_dtype == "fp4"
    assert config.sliding_window == 128 and config.vocab_size == 4096
    assert config.decoder_start >= 5 and config.num_hidden_layers - config.decoder_start >= 5
    kinds = [(s.owns_kv, s.owns_index, s.ratio) for s in config.layers]
    assert {(True, True, 2), (True, True, 1), (False, True, 1), (False, False, 2)} <= set(kinds)
    assert any(s.candidate_source for s in config.layers)
    assert any(s.uses_candidates for s in config.layers)
    assert len(config.engram_layer_ids) == 2


def test_bits_per_byte_of_a_held_out_module(llm):
    """`statistics` was kept out of training; 768 tokens of it stay below one bit a byte."""
    text = inspect.getsource(statistics)[:4000]
    tokenizer = Tokenizer(FOLDER / "tokenizer.json", 0)
    ids = tokenizer.encode(text)[:769]
    size = len(tokenizer.decode(ids[1:]).encode())
    logits = llm.logits(ids[:-1]).double()
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
    bits = nats / math.log(2) / size
    print(f"{bits:.3f} bits per byte")
    assert bits <= 1.0


@pytest.mark.parametrize("op", "+-*")
def test_arithmetic(llm, vocabulary, op):
    """Five questions that training never saw, answered with their steps, token for token."""
    questions = exercises.arithmetic_eval(vocabulary, op, 5, seed=7)
    answers = llm.generate(
        [list(q.prompt) for q in questions],
        [deepinfer.SamplingParams(max_tokens=len(q.target) + 8, temperature=0) for q in questions],
    )
    right = [list(a.token_ids) == list(q.target) for a, q in zip(answers, questions, strict=True)]
    assert sum(right) >= 4
    assert all(a.finish_reason == "stop" for a, r in zip(answers, right, strict=True) if r)
