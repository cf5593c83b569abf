"""Random weights made in place: what a checkpoint of them would hold, from a seed."""

import torch

from deepinfer.checkpoint import noise
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.load import load_weights
from deepinfer.checkpoint.synth import random_tensors, write_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.quant import Packed, codec
from tests import t6


def values(entry):
    return codec.unpack(entry, torch.float32) if isinstance(entry, Packed) else entry.float()


def raw(entry):
    parts = (entry.codes, entry.scales) if isinstance(entry, Packed) else (entry,)
    return [part.contiguous().view(torch.uint8) for part in parts]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(raw(one), raw(other), strict=True))


CONFIG = t6.model_config(quantised=True)


def test_entries_are_those_of_a_loaded_checkpoint(tmp_path):
    folder = t6.write(tmp_path / "t6", quantised=True)
    loaded, made = load_weights(open_checkpoint(folder)), noise.random_weights(CONFIG)
    assert list(made) == list(loaded) and made.report.nbytes == loaded.report.nbytes
    for name, entry in loaded.items():
        assert type(made[name]) is type(entry), name
        assert [(p.shape, p.dtype) for p in raw(made[name])] == [
            (p.shape, p.dtype) for p in raw(entry)
        ], name
    assert not [n for n in noise.random_weights(CONFIG, draft=False) if n.startswith("mtp.")]


def test_a_seed_gives_the_same_bits_and_another_one_others():
    one, again, other = (noise.random_weights(CONFIG, seed=seed) for seed in (0, 0, 1))
    assert all(same(one[name], again[name]) for name in one)
    assert not any(same(one[name], other[name]) for name in one)
    bare = noise.random_weights(CONFIG, draft=False)
    assert all(same(bare[name], one[name]) for name in bare)


def test_values_are_as_large_as_those_of_random_checkpoints():
    made, wanted = noise.random_weights(CONFIG), random_tensors(CONFIG)
    for name, tensor in wanted.items():
        got, like = values(made[name]), tensor.float()
        assert got.isfinite().all(), name
        if tensor.numel() > 2000 and "hc_" not in name:
            assert 0.9 < got.std() / like.std() < 1.1, name
            assert abs(got.mean() - like.mean()) < 6 * like.std() / tensor.numel() ** 0.5, name
            few = got.flatten()[:1000].unique().numel()
            assert few > (15 if isinstance(made[name], Packed) else 100), name


def test_chunks_leave_no_seam(monkeypatch):
    """Every byte is drawn, also behind the last whole word of a chunk."""
    monkeypatch.setattr(noise, "CHUNK", 1000)
    draw = torch.Generator().manual_seed(0)
    for kind, block in (("fp4", (1, 32)), ("fp8", (32, 32))):
        width = 64 if kind == "fp4" else 128
        code = torch.uint8 if kind == "fp4" else torch.float8_e4m3fn
        entry = Packed(
            torch.zeros(96, width, dtype=torch.uint8).view(code),
            torch.zeros(96 // block[0], 4, dtype=torch.uint8), block, kind,
        )  # fmt: skip
        (noise._fp4 if kind == "fp4" else noise._fp8)(entry, 0.02, draw)
        found = codec.unpack(entry, torch.float32)
        assert abs(found.std() / 0.02 - 1) < 0.05
        assert (entry.scales > 100).all()
        assert all(row.unique().numel() > 10 for row in entry.codes.view(torch.uint8))


def test_a_tied_head_is_the_embedding():
    data = t6.config(quantised=True)
    data["text_config"]["tie_word_embeddings"] = True
    made = noise.random_weights(ModelConfig.from_dict(data))
    assert made["head.weight"] is made["embed.weight"]


def test_what_was_made_can_be_written_and_read(tmp_path):
    """The bits of a checkpoint: `write_checkpoint` takes packed tensors as they are."""
    made = noise.random_weights(CONFIG)
    token_map, _ = t6.token_map()
    folder = write_checkpoint(tmp_path / "a", t6.config(quantised=True), made, token_map=token_map)
    loaded = load_weights(open_checkpoint(folder))
    assert all(same(made[name], loaded[name]) for name in made)
