"""What a runner keeps between steps, against the whole sequence run again without any state.

Everything runs on the pools, poisoned first: storage that was never written shows as NaN, and what
was written can be counted. Equal to the reference path of `tests.plain` within 1e-4 in fp32, and
identical to a prefill of the whole sequence.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.load import load_weights
from deepinfer.core.step import Chunk, StepPlan
from deepinfer.engine.runner import Runner
from deepinfer.errors import UsageError
from deepinfer.model.transformer import Transformer
from deepinfer.ops import registry
from deepinfer.ops.torch import memory
from deepinfer.tokenizer.mapping import NO_TOKEN, TokenMap
from tests import plain, t6

PAGE = t6.PAGE_TOKENS
PAGES = 25  # of each slot: up to 100 tokens
SLOTS = 26
DECODED = 9


class Model:
    """A variant of T6 behind a runner; slot s owns pages [s * PAGES, (s + 1) * PAGES)."""

    def __init__(self, folder, **changes):
        self.token_map = t6.token_map()[0]
        checkpoint = open_checkpoint(t6.write(folder, **changes))
        self.config, self.weights = checkpoint.config, load_weights(checkpoint, draft=False)
        self.ops = registry.build("cpu")
        self.runner = Runner(
            self.config, self.weights, self.ops,
            slots=SLOTS, pages=SLOTS * PAGES, page_tokens=PAGE, token_map=self.token_map,
        )  # fmt: skip

    def step(self, *chunks: tuple[int, int, list[int]], rows: int | None = 1) -> torch.Tensor:
        """Logits of one step of (slot, start, ids); `rows` of each chunk, None: all."""
        plan = []
        for slot, start, ids in chunks:
            pages = range(slot * PAGES, slot * PAGES + -(-(start + len(ids)) // PAGE))
            wanted = len(ids) if rows is None else rows
            plan.append(Chunk(slot, start, tuple(ids), tuple(pages), wanted))
        return self.runner.forward(StepPlan(tuple(plan)))

    def chunked(self, ids: list[int], size: int, slot: int = 0) -> torch.Tensor:
        """Logits of every row, run in chunks of `size`."""
        starts = range(0, len(ids), size)
        return torch.cat([self.step((slot, s, ids[s : s + size]), rows=None) for s in starts])

    def plain(self, ids: list[int]) -> torch.Tensor:
        return plain.logits(self.runner.model, self.token_map, ids)

    def written(self, slot: int) -> dict[tuple[str, int], int]:
        """Entries and index keys of each source that hold something, all in front."""
        counts = {}
        pools = self.runner.pools
        for name, held in (("entry", pools.entries), ("index", pools.index)):
            for layer, records in held.items():
                per_page = PAGE // self.config.compress_ratios[layer]
                mine = records[slot * PAGES * per_page : (slot + 1) * PAGES * per_page]
                full = (mine != 0xFF).any(-1)
                counts[name, layer] = count = int(full.sum())
                assert full[:count].all(), f"layer {layer}: a gap between its {name} records"
        return counts

    def entries_of(self, tokens: int) -> dict[tuple[str, int], int]:
        """What `written` has to be at a length."""
        return {
            (name, layer): tokens // self.config.compress_ratios[layer]
            for name in ("entry", "index")
            for layer in self.config.kv_source_layer_ids
        }


def prompt(length: int, start: int = 0) -> list[int]:
    return [11 + (start * 31 + at * at * 7 + at) % 256 for at in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("t6") / "m")


@pytest.fixture(
    params=[{"ratio": 2}, {"ratio": 4}, {"quantised": True}, {"quantised": True, "ratio": 4}],
    ids=["ratio2", "ratio4", "quantised", "quantised-ratio4"],
)
def variant(request, tmp_path):
    return Model(tmp_path / "m", **request.param)


def test_every_residue(variant):
    """DI-06: prompts of 1 to 13 tokens side by side, then 9 greedy tokens each."""
    texts = [prompt(n, n) for n in range(1, 14)]
    again = range(13, 26)  # slots of the sequences that run again as a whole
    variant.runner.pools.poison()
    rows = variant.step(*((slot, 0, ids) for slot, ids in enumerate(texts)))
    decoded = []
    for step in range(DECODED + 1):
        assert rows.isfinite().all()
        whole = variant.step(*zip(again, [0] * 13, texts, strict=True))
        assert torch.equal(rows, whole), f"after {step} decode steps"
        decoded.append(rows)
        for slot, ids in enumerate(texts):
            assert variant.written(slot) == variant.entries_of(len(ids)), (slot, step)
        if step == DECODED:
            break
        for ids, row in zip(texts, rows, strict=True):
            ids.append(int(row.argmax()))
        rows = variant.step(*((slot, len(ids) - 1, ids[-1:]) for slot, ids in enumerate(texts)))
    if variant.config.quantised:
        return
    for slot, ids in enumerate(texts):
        got = torch.stack([rows[slot] for rows in decoded])
        torch.testing.assert_close(got, variant.plain(ids)[slot:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1, 3, 7, 32, 96])
def test_far_beyond_the_window(model, size):
    """DI-08: logits of every row, the last of which sees six windows back."""
    ids = prompt(96)
    model.runner.pools.poison()
    got = model.chunked(ids, size)
    torch.testing.assert_close(got, model.plain(ids), rtol=0, atol=1e-4)
    assert model.written(0) == model.entries_of(96)


@pytest.fixture
def choices(model, monkeypatch):
    """Every call of `choose` from now on: its visible counts, `within` and results."""
    calls, choose = [], model.ops.choose

    def recorded(q, weights, records, fmt, table, visible, most, k, candidates, within):
        out = choose(q, weights, records, fmt, table, visible, most, k, candidates, within)
        assert table.shape[1] == most[-1] == visible.max()
        calls.append((visible, within, *out))
        return out

    monkeypatch.setattr(model.ops, "choose", recorded)
    return calls


@pytest.mark.parametrize("size", [32, 96])
def test_the_indexer_chooses_from_all_entries(model, choices, size):
    """DI-08: the last token may choose from 48 entries of ratio 2, not the 16 of its chunk."""
    model.chunked(prompt(96), size)
    # One selection of each of the three index sources a chunk: ratio 2, and twice ratio 1.
    assert [int(visible.max()) for visible, *_ in choices[-3:]] == [48, 96, 96]
    slots = choices[-3][2][0]  # [rows, k]; the first pages: slots are entries
    if size == 32:
        assert ((slots >= 0) & (slots < 32)).any(1).all(), "of an earlier chunk"


def test_candidates_limit_the_later_sources(model, choices):
    """Layer 5 chooses among the 8 blocks of 8 that layer 3 kept, of 12."""
    model.step((0, 0, prompt(96)))
    first, second, third = choices
    assert first[1] is None and second[1] is None and first[3] is None and third[3] is None
    kept = second[3]
    assert third[1] is kept and kept.shape == (1, 96, 12)
    assert kept[0, -1].sum() == 8 and kept[0, -1, 11], "the newest block stays"
    assert kept[0].sum(1).tolist()[:17] == [1] * 8 + [2] * 8 + [3], "visible entries only"
    slots = third[2][0, -1]
    assert kept[0, -1][slots[slots >= 0] // 8].all()


def test_scoring_candidates_alone_chooses_what_a_mask_chooses(model, choices, monkeypatch):
    """The gathered form of the last index source against scores of everything, masked."""
    ids, plain = prompt(96), memory._choose_within
    for within in (plain, masked):
        monkeypatch.setattr(memory, "_choose_within", within)
        model.step((0, 0, ids[:50]))
        model.step((0, 50, ids[50:]))
    assert len(choices) == 12
    for one, other in zip(choices[:6], choices[6:], strict=True):
        assert torch.equal(one[2], other[2])


def masked(q, weights, records, fmt, table, visible, k, candidates, within):
    scores = memory.index_scores(q, fmt.decode(records[table]), weights)
    allowed = within.repeat_interleave(candidates[1], -1)[..., : table.shape[1]]
    return memory._slots(table, memory.select(scores, visible, k, allowed))


def test_rope_bases_are_read(model):
    """DI-08: equal bases give other logits, and each base is that of its own layers."""
    ids, rows = prompt(40), {}
    for name, change in (
        ("given", {}),
        ("equal", {"compress_rope_theta": 10000}),
        ("other", {"rope_theta": 20000}),
        ("unscaled", {"rope_scaling": None}),
    ):
        config = t6.model_config(**change)
        other = Transformer(config, model.weights, model.ops)
        rows[name] = plain.logits(other, model.token_map, ids)[-1]
    assert torch.allclose(rows["given"], model.chunked(ids, 40)[-1], rtol=0, atol=1e-4)
    names = list(rows)
    for at, one in enumerate(names):
        for two in names[:at]:
            assert (rows[one] - rows[two]).abs().max() > 1e-3, (one, two)


@pytest.mark.parametrize("size", [20, 7, 1])
def test_engram_rows_do_not_depend_on_chunks(model, monkeypatch, size):
    """DI-09 (a): table rows of each position, recorded where the model asks for them."""
    rows = []

    def recorded(ngrams, multipliers, primes):
        rows.append(engram_rows(ngrams, multipliers, primes))
        return rows[-1]

    engram_rows = model.ops.engram_rows
    monkeypatch.setattr(model.ops, "engram_rows", recorded)
    ids = prompt(20, 3)
    model.runner.pools.history.fill_(1 << 40)  # what another request may have left behind
    model.chunked(ids, size)
    assert torch.cat(rows).tolist() == plain.engram_rows(model.config, model.token_map, ids)


def test_ids_outside_the_vocabulary(model):
    """DI-09 (d)."""
    token_map = TokenMap.of(model.config, model.token_map)
    pad = model.token_map[model.config.engram_pad_token_id]
    assert token_map.lookup(np.array([NO_TOKEN, 2, 11])).tolist() == [
        pad, pad, model.token_map[11],
    ]  # fmt: skip
    for bad in (t6.VOCAB_SIZE, -2, 1 << 40):
        with pytest.raises(UsageError) as caught:
            token_map.lookup(np.array([3, NO_TOKEN, bad]))
        assert caught.value.code == "token-id-invalid" and str(bad) in caught.value.message


def test_no_ids_no_rows(model):
    """DI-09 (e)."""
    token_map = TokenMap.of(model.config, model.token_map)
    assert token_map.lookup(np.array([], dtype=np.int64)).shape == (0,)
    engram = next(block.engram for block in model.runner.model.blocks if block.engram)
    none = torch.zeros((0, model.config.engram_max_ngram_size), dtype=torch.int64)
    rows = model.ops.engram_rows(none, engram.multipliers, engram.primes)
    assert rows.shape == (0, 6)
    assert model.ops.engram_lookup(engram.table, rows, torch.float32).shape == (0, 6 * 32)


def test_a_reused_slot_starts_afresh(model):
    """Nothing of the last owner shows: window, open groups, history, pages."""
    ids = prompt(19, 5)
    model.runner.pools.poison()
    expected = model.chunked(ids, 19)
    for left in (1, 2, 3, 33, 96):
        model.chunked(prompt(left, 9), 96)
        assert torch.equal(model.chunked(ids, 4), expected), left


def test_the_window_ring_has_one_row_a_position(model):
    """DI-05: after any length a slot's ring holds at most a window of rows, in every layer."""
    pools, window = model.runner.pools, model.config.sliding_window
    pools.poison()
    ids = prompt(100, 2)
    for at in range(100):
        model.step((1, at, ids[at : at + 1]))
        if at % 13 and at < 98:
            continue
        for ring in pools.windows:
            full = (ring != 0xFF).any(-1)
            assert int(full.sum()) == min(at + 1, window)
            assert int(full[window : 2 * window].sum()) == min(at + 1, window), "slot 1 alone"
