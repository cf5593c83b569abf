"""Verification rules: the target's law over a million draws, the ids of plain decoding, and rows
that concern nobody else. No model: tables play target and drafter."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepinfer.core.request import SamplingParams  # noqa: E402
from deepinfer.device.sync import no_sync  # noqa: E402
from deepinfer.ops.torch import sampling as reference  # noqa: E402
from deepinfer.sampling import logits as logits_module  # noqa: E402
from deepinfer.sampling import rng, sampler  # noqa: E402
from deepinfer.sampling.logits import Row, Rows  # noqa: E402
from deepinfer.speculative import schedule, verify  # noqa: E402
from tests.verdicts import Verdict, verdicts  # noqa: E402

G = np.uint64(rng.G)

RULES = ("rejection", "coupled")


def mixed(x):
    """`rng.mix` of many words at once."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seeds, positions, purpose):
    """`rng.key` of many streams at once."""
    x = mixed(mixed(seeds.astype(np.uint64) + G) ^ np.uint64(purpose))
    return mixed(x + G * (positions + 1).astype(np.uint64))


def words(streams, counter):
    step = np.uint64(rng.G * (counter + 1) % 2**64)
    return (mixed(streams + step) >> np.uint64(12)).astype(np.float64)


def uniforms(seeds, positions, purpose):
    """`rng.uniform` of many streams at once."""
    return torch.from_numpy((words(keys(seeds, positions, purpose), 0) + 0.5) * 2.0**-52)


def gumbels(seeds, positions, purpose, vocab):
    streams = keys(seeds, positions, purpose)
    u = (np.stack([words(streams, v) for v in range(vocab)], 1) + 0.5) * 2.0**-52
    return torch.from_numpy(-np.log(-np.log(u)))


def test_many_streams_at_once_are_the_generators():
    seeds, positions = np.arange(50) * 977, np.arange(50) % 7
    assert keys(seeds, positions, 3).tolist() == [
        rng.key(int(s), int(t), 3) for s, t in zip(seeds, positions, strict=True)
    ]
    assert uniforms(seeds, positions, 1).tolist() == [
        rng.uniform(int(s), int(t), 1) for s, t in zip(seeds, positions, strict=True)
    ]
    ours = gumbels(seeds, positions, 0, 5)
    theirs = torch.stack([torch.from_numpy(rng.gumbel(rng.key(int(s), int(t)), 5))
                          for s, t in zip(seeds, positions, strict=True)])  # fmt: skip
    assert (ours - theirs).abs().max() < 1e-8


# Target and drafter by the token before.
P = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.4, 0.4], [0.4, 0.3, 0.3]], dtype=torch.float64)
Q = torch.tensor([[0.4, 0.2, 0.4], [0.3, 0.3, 0.4], [0.3, 0.3, 0.4]], dtype=torch.float64)
BLOCK = 3

# Seconds by rows, and confidence by the token before. In the first game 0 to 3 drafts are worth
# it; in the second all three or none, by the first and the second drafted token.
MIXED = ((1.0, 1.6, 2.2, 2.5), (0.95, 0.7, 0.1))
JUMPY = ((1.0, 2.0, 3.0, 3.5), (0.95, 0.95, 0.05))


def lengths(game, stale=True):
    """How many drafts are verified, by the old block and the new one: [27, 27].

    A block's number in base 3: the token before it, then its drafts but the last. `stale` is the
    right rule; else the budget looks at the very block that it admits.
    """
    seconds, chance = game
    blocks = [
        schedule.survivals([chance[n // 9], chance[n // 3 % 3], chance[n % 3]]) for n in range(27)
    ]
    out = np.zeros((27, 27), dtype=np.int64)
    for old, new in np.ndindex(27, 27):
        known = blocks[old] if stale else blocks[new]
        extra = schedule.budget([known], 1, lambda rows, requests: seconds[rows - 1])
        out[old, new] = schedule.split([blocks[new]], extra)[0]
    return out


def play(rule, game, draws, stale=True, purpose=verify.draft_purpose):
    """Many sequences step by step, each a batch of its own, until so many tokens are out.

    Gives the total variation between the pairs (token, next) seen and what the target makes of the
    first tokens, accepted drafts by verified ones, and the ids of the first sequences.
    """
    table = lengths(game, stale)
    seeds = np.arange(20_000)
    at, newest, old = np.zeros_like(seeds), np.zeros_like(seeds), np.full_like(seeds, 26)
    pairs, ids = np.zeros((3, 3)), [[] for _ in range(4)]
    accepted = verified = 0
    while pairs.sum() < draws:
        drafts, before = [], [newest.copy()]
        for slot in range(BLOCK):
            kind = rng.TARGET if rule == "coupled" else purpose(slot)
            noise = gumbels(seeds, at + 1 + slot, kind, 3)
            drafts.append((Q.log()[before[slot]] + noise).argmax(-1).numpy())
            before.append(drafts[-1])
        block = before[0] * 9 + before[1] * 3 + before[2]
        length = table[old, block]
        where = np.arange(len(seeds))  # sequences whose drafts stood so far
        for slot in range(BLOCK + 1):
            own, place, given = seeds[where], at[where] + 1, before[slot][where]
            judged, stands = length[where] > slot, np.zeros(len(where), dtype=bool)
            token = (P.log()[given] + gumbels(own, place, rng.TARGET, 3)).argmax(-1).numpy()
            if slot < BLOCK and rule == "coupled":
                stands = judged & (token == drafts[slot][where])
            elif slot < BLOCK:
                y = drafts[slot][where]
                draw = uniforms(own, place, rng.ACCEPT)
                stands = verify.accepts(P[given], Q[given], torch.from_numpy(y), draw).numpy()
                draw = uniforms(own, place, rng.RESIDUAL)
                again = verify.redraw(P[given], Q[given], draw).numpy()
                token = np.where(judged, np.where(stands, y, again), token)
                stands &= judged
            accepted, verified = accepted + stands.sum(), verified + judged.sum()
            np.add.at(pairs, (given, token), 1)
            for here in range(np.searchsorted(where, len(ids))):
                ids[where[here]].append(int(token[here]))
            newest[where], at[where] = token, place
            where = where[stands]
        old = block
    wanted = pairs.sum(1, keepdims=True) * P.numpy()
    return np.abs(pairs - wanted).sum() / pairs.sum() / 2, accepted / verified, ids


@pytest.mark.parametrize("game", [MIXED, JUMPY])
def test_rejection_gives_the_targets_law_over_a_million_draws(game):
    assert len(set(lengths(game).flat)) > (1 if game is JUMPY else 3)
    distance, accepted, _ = play("rejection", game, 1_000_000)
    assert distance <= 0.002
    assert 0.82 < accepted < 0.92


def test_coupled_gives_the_targets_law_over_a_million_draws():
    distance, accepted, ids = play("coupled", MIXED, 1_000_000)
    assert distance <= 0.002
    apart = float((P - Q).clamp(min=0).sum(-1).max())
    assert accepted > (1 - apart) / (1 + apart)
    for seed, some in enumerate(ids):
        token, plain = 0, []
        for at in range(1, len(some) + 1):
            noise = torch.from_numpy(rng.gumbel(rng.key(seed, at), 3))
            token = int((P[token].log() + noise).argmax())
            plain.append(token)
        assert some == plain, "what was drafted and verified shows in the ids"


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"stale": False}, id="the budget looks at the block that it admits"),
        pytest.param({"purpose": lambda slot: rng.DRAFT}, id="a position has one noise for ever"),
    ],
)
def test_a_budget_that_knows_the_drafts_shows_in_the_law(wrong):
    distance, _, _ = play("rejection", JUMPY, 200_000, **wrong)
    assert distance > 0.02


@pytest.mark.parametrize("stale, share", [(True, 0.7), (False, 0.85)])
def test_appendix_a_game(stale, share):
    """Target 0.7 / 0.3, drafter 1 / 2, steps a second 1, 0.5, 0.45 by rows, first confidence 0.8;
    the second one is 1 behind A and 0 behind B (performance ledger §2.2)."""
    seconds = (1.0, 1 / 0.5, 1 / 0.45)
    blocks = [schedule.survivals([0.8, second]) for second in (1.0, 0.0)]
    seeds, where = np.arange(1_000_000), np.zeros(1_000_000, dtype=np.int64)
    p, q = torch.tensor([[0.7, 0.3]] * 2, dtype=torch.float64), torch.full((2, 2), 0.5).double()
    p, q = p[:1].expand(len(seeds), 2), q[:1].expand(len(seeds), 2)
    draft = (uniforms(seeds, where + 1, verify.draft_purpose(0)) > 0.5).long()
    # What the block before had: here the law of the drafter, drawn from elsewhere.
    known = (uniforms(seeds, where, verify.draft_purpose(1)) > 0.5).long() if stale else draft
    extra = torch.tensor(
        [schedule.budget([some], 1, lambda rows, _: seconds[rows - 1]) for some in blocks]
    )
    assert extra.tolist() == [2, 0]
    stands = verify.accepts(p, q, draft, uniforms(seeds, where + 1, rng.ACCEPT))
    again = verify.redraw(p, q, uniforms(seeds, where + 1, rng.RESIDUAL))
    fresh = (uniforms(seeds, where + 1, rng.TARGET) > 0.7).long()
    token = torch.where(extra[known] > 0, torch.where(stands, draft, again), fresh)
    assert abs(float((token == 0).double().mean()) - share) <= 0.002


# --- the functions the engine calls -------------------------------------------------------------


parameters = cache(SamplingParams)


def row(seed=7, position=5, temperature=1.0, forbidden=(), **params):
    return Row(parameters(temperature=temperature, **params), seed, position, forbidden)


def logits_of(probabilities):
    return torch.tensor(probabilities).log()


def propose(x, rows, slot, rule):
    ids, scores = verify.propose(x, Rows.of(rows, "cpu"), slot, rule)
    return ids.tolist(), scores


def laid_out(drafts, scores, vocab, wide=None, junk=0):
    """first, drafts, shares and scores of `verify.verify`: scores of the drafts one after another
    go to their cells; drafts that no share covers are `junk`, and their scores are not numbers."""
    wide = max(map(len, drafts), default=0) if wide is None else wide
    shares = torch.tensor([len(ids) for ids in drafts], dtype=torch.int64)
    ids = torch.full((len(drafts), wide), junk)
    cells = torch.full((len(drafts), wide, vocab), math.nan, dtype=torch.float64)
    at = 0
    for r, some in enumerate(drafts):
        ids[r, : len(some)] = torch.tensor(some, dtype=torch.int64)
        if scores is not None:
            cells[r, : len(some)] = scores[at : at + len(some)]
        at += len(some)
    first = (shares + 1).cumsum(0) - shares - 1
    return first, ids, shares, None if scores is None else cells


def judge(x, rows, drafts, scores, rule):
    """Verdicts on a batch whose rows follow each other without a gap."""
    first, ids, shares, cells = laid_out(drafts, scores, x.shape[-1])
    most = ids.shape[1] + 1
    judged = verify.verify(x, Rows.of(rows, "cpu"), first, ids, shares, cells, rule, most)
    assert judged.tokens.shape == (len(drafts), most)
    return verdicts(judged)


def generate(requests, target, drafter, rule, tokens, draft_lengths, **params):
    """Ids of many requests of one batch, as an engine makes them; also drafts verified, accepted.

    target, drafter: a row of logits by the ids so far. draft_lengths: by (request, step).
    """
    out = [[] for _ in range(requests)]
    verified = accepted = step = 0
    while min(map(len, out)) < tokens:
        going = [r for r in range(requests) if len(out[r]) < tokens]
        counts = [draft_lengths(r, step) for r in going]
        drafts, scores = [[] for _ in going], [[] for _ in going]
        for slot in range(max(counts)):
            some = [at for at, count in enumerate(counts) if count > slot]
            x = torch.stack([drafter((*out[going[at]], *drafts[at])) for at in some])
            rows = [row(going[at], 1 + len(out[going[at]]) + slot, **params) for at in some]
            ids, given = propose(x, rows, slot, rule)
            for here, at in enumerate(some):
                drafts[at].append(ids[here])
                if given is not None:
                    scores[at].append(given[here])
        x, rows = [], []
        for at, r in enumerate(going):
            for slot in range(counts[at] + 1):
                x.append(target((*out[r], *drafts[at][:slot])))
                rows.append(row(r, 1 + len(out[r]) + slot, **params))
        flat = [one for some in scores for one in some]
        judged = judge(torch.stack(x), rows, drafts, torch.stack(flat) if flat else None, rule)
        for at, r in enumerate(going):
            assert not judged[at].broken
            out[r] += judged[at].tokens
            accepted += judged[at].accepted
            verified += counts[at]
        step += 1
    return [ids[:tokens] for ids in out], verified, accepted


@pytest.mark.parametrize(
    "params, wanted, rate",
    [
        ({}, [0.5, 0.3, 0.2], 0.7),
        ({"temperature": 0.5}, [0.658, 0.237, 0.105], None),
        ({"top_k": 2}, [0.625, 0.375, 0.0], None),
    ],
)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_sampling_keeps_the_targets_distribution(rule, params, wanted, rate):
    p, q = logits_of([0.5, 0.3, 0.2]), logits_of([0.2, 0.5, 0.3])
    requests = 4000
    ids, verified, accepted = generate(
        requests,
        lambda ids: p,
        lambda ids: q,
        rule,
        2,
        lambda r, step: r % 2 if step else 1,
        **params,
    )
    for at in range(2):
        seen = np.bincount([some[at] for some in ids], minlength=3) / requests
        assert np.abs(seen - wanted).max() < 0.025
    if rate and rule == "rejection":
        assert abs(accepted / verified - rate) < 0.02


def language(seed, vocab=40, reach=2, sharp=2.0):
    """A target that reads its last ids: any prefix has its own row."""

    @cache
    def logits(ids):
        place = sum((token + 7) * vocab**at for at, token in enumerate(ids))
        return torch.from_numpy(rng.gumbel(rng.key(seed, place), vocab) * sharp).float()

    return lambda ids: logits(ids[-reach:])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_coupled_and_greedy_ids_do_not_depend_on_drafts(temperature):
    target, far = language(1), language(2)
    near = lambda ids: target(ids) + 0.3 * far(ids)  # noqa: E731
    plain, _, _ = generate(4, target, far, "coupled", 24, lambda r, s: 0, temperature=temperature)
    drafters = {"same": target, "near": near, "far": far,
                "broken": lambda ids: far(ids) * (math.nan if len(ids) % 3 else 1.0)}  # fmt: skip
    kept = {}
    for name, drafter in drafters.items():
        for lengths_of in (lambda r, s: 5, lambda r, s: (3 * r + 5 * s) % 4):
            ids, verified, accepted = generate(
                4, target, drafter, "coupled", 24, lengths_of, temperature=temperature
            )
            assert ids == plain, name
            kept.setdefault(name, accepted / verified)
    assert kept["same"] == 1.0 > kept["near"] > kept["far"]
    alone, _, _ = generate(1, target, near, "coupled", 24, lambda r, s: 4, temperature=temperature)
    assert alone[0] == plain[0]
    sampled = [
        sampler.sample(
            target(tuple(plain[2][:at]))[None], Rows.of([row(2, 1 + at, temperature)], "cpu")
        ).item()
        for at in range(24)
    ]
    assert plain[2] == sampled, "plain sampling is the sampler's"


def test_rejection_depends_on_seed_and_own_drafts_alone():
    target, drafter = language(1), language(3)
    full, _, _ = generate(5, target, drafter, "rejection", 20, lambda r, s: 3)
    assert generate(5, target, drafter, "rejection", 20, lambda r, s: 3)[0] == full
    alone, _, _ = generate(1, target, drafter, "rejection", 20, lambda r, s: 3)
    assert alone[0] == full[0]
    assert len({tuple(ids) for ids in full}) == 5
    perfect, verified, accepted = generate(3, target, target, "rejection", 20, lambda r, s: 5)
    assert verified == accepted


def batch(seed=0, vocab=300, rule="rejection"):
    """A ragged batch: greedy and sampled requests, 0 to 5 drafts, some of them likely to stand."""
    target, drafter = language(seed, vocab), language(seed + 1, vocab)
    temperatures = [1.0, 0.0, 0.7, 1.0, 0.0, 1.3, 1.0, 0.7, 1.0]
    counts = [5, 3, 0, 1, 5, 4, 2, 0, 5]
    x, rows, drafts, scores = [], [], [], []
    for r, (temperature, count) in enumerate(zip(temperatures, counts, strict=True)):
        ids = []
        for slot in range(count + 1):
            if slot:
                some = [row(r, 9 + slot, temperature, top_k=20)]
                mix = target((r, *ids)) + 0.4 * drafter((r, *ids))
                token, given = propose(mix[None], some, slot - 1, rule)
                ids += token
                scores.append(mix.double() if given is None else given[0])
            x.append(target((r, *ids)))
            rows.append(row(r, 10 + slot, temperature, top_k=20))
        drafts.append(ids)
    return torch.stack(x), rows, drafts, torch.stack(scores)


def one_by_one(x, rows, drafts, scores, rule):
    out, at, behind = [], 0, 0
    for ids in drafts:
        span, drawn = slice(at, at + len(ids) + 1), slice(behind, behind + len(ids))
        out += judge(x[span], rows[span], [ids], scores[drawn] if ids else None, rule)
        at, behind = span.stop, drawn.stop
    return out


@pytest.mark.parametrize("rule", RULES)
def test_a_ragged_batch_is_its_requests_one_by_one(rule, monkeypatch):
    some = [batch(seed, rule=rule) for seed in range(4)]
    together = [judge(*one, rule) for one in some]
    assert together == [one_by_one(*one, rule) for one in some]
    counts = {verdict.accepted for answers in together for verdict in answers}
    assert {0, 1, 5} <= counts
    for one, answers in zip(some, together, strict=True):
        for ids, verdict in zip(one[2], answers, strict=True):
            assert verdict.tokens[:-1] == tuple(ids[: verdict.accepted])
            assert len(verdict.tokens) == verdict.accepted + 1
    monkeypatch.setattr(reference, "_BLOCK", 1000)
    assert together == [judge(*one, rule) for one in some], "blocks of rows show"


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_row_concerns_its_request_alone(rule):
    for seed in range(2):
        x, rows, drafts, scores = batch(seed, rule=rule)
        fine = judge(x, rows, drafts, scores, rule)
        at = 0
        for r, ids in enumerate(drafts):
            for slot in range(len(ids) + 1):
                hurt = x.clone()
                hurt[at + slot, 17] = math.nan if slot % 2 else math.inf
                got = judge(hurt, rows, drafts, scores, rule)
                assert got[:r] + got[r + 1 :] == fine[:r] + fine[r + 1 :]
                if slot > fine[r].accepted:
                    assert got[r] == fine[r], "behind the deciding row nothing is looked at"
                else:
                    assert got[r] == Verdict(slot, tuple(ids[:slot]), broken=True)
            at += len(ids) + 1


def test_no_draft_is_plain_sampling():
    x, rows, drafts, scores = batch()
    starts = [0, *np.cumsum([len(ids) + 1 for ids in drafts])[:-1].tolist()]
    plain = sampler.sample(x[starts], Rows.of([rows[at] for at in starts], "cpu")).tolist()
    got = judge(x[starts], [rows[at] for at in starts], [()] * len(drafts), None, "rejection")
    assert [verdict.tokens for verdict in got] == [(token,) for token in plain]


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_of_minus_one_ends_the_block(rule):
    for seed in range(2):
        x, rows, drafts, scores = batch(seed, rule=rule)
        at = behind = 0
        for ids in drafts:
            for slot in range(len(ids)):
                given = [*ids[:slot], -1, *ids[slot + 1 :]]
                span, drawn = slice(at, at + len(ids) + 1), slice(behind, behind + len(ids))
                short = slice(at, at + slot + 1)
                got = judge(x[span], rows[span], [given], scores[drawn], rule)
                cut = judge(x[short], rows[short], [ids[:slot]], scores[drawn][:slot], rule)
                assert got == cut
            at, behind = at + len(ids) + 1, behind + len(ids)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_drafter_before_a_broken_target(rule, temperature):
    x, scores = torch.tensor([[math.nan, 0.0], [1.0, 0.0]]), torch.zeros(1, 2).double()
    rows = [row(1, 4, temperature), row(1, 5, temperature)]
    for given in (scores, None):
        assert judge(x, rows, [[-1]], given, rule) == [Verdict(0, (), broken=True)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_drafter_breaks_nothing(rule, temperature):
    x = torch.tensor([[0.0, 1.0, 2.0], [math.nan, 0.0, 0.0], [-math.inf, 0.0, 0.0]])
    rows = [row(1, 4, temperature), row(2, 4, temperature), row(3, 4, temperature)]
    ids, scores = propose(x, rows, 0, rule)
    assert ids[0] >= 0 and ids[1:] == [-1, -1]
    whole = torch.zeros(6, 3)
    named = [one for r in rows for one in (r, row(r.seed, 5, temperature))]
    got = judge(whole, named, [[token] for token in ids], scores, rule)
    assert [verdict.accepted for verdict in got[1:]] == [0, 0]
    assert not any(verdict.broken for verdict in got)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_forbidden_in_one_row_is_so_in_that_row(rule, temperature):
    """min_tokens 3 against a target and a drafter that want the end, id 0, at once."""
    x = torch.tensor([[9.0, 5.0, -9.0]] * 6)
    for seed in range(20):
        rows = [row(seed, 4 + at, temperature, forbidden=(0,) if at < 3 else ()) for at in range(6)]
        drafts, scores = [], []
        for slot in range(5):  # the drafter does not know the rule
            some = [row(seed, 4 + slot, temperature)]
            ids, given = propose(x[:1], some, slot, rule)
            drafts += ids
            scores.append(x[0].double() if given is None else given[0])
        out = []
        while len(out) < 3:  # step by step, as nothing drafted at first can stand
            at = len(out)
            (verdict,) = judge(x[at:], rows[at:], [drafts[at:]], torch.stack(scores[at:]), rule)
            out += verdict.tokens
        assert 0 not in out[:3]
        assert temperature or out == [1, 1, 1]


def test_nothing_allowed_is_broken():
    x = torch.zeros(2, 3)
    for rule in RULES:
        for temperature in (0.0, 1.0):
            rows = [row(1, 4, temperature), row(1, 5, temperature, forbidden=(0, 1, 2))]
            for draft in range(3):
                scores = torch.full((1, 3), -30.0).double()
                scores[0, draft] = 0.0
                (verdict,) = judge(x, rows, [[draft]], scores, rule)
                assert verdict.broken == (verdict.accepted == 1)
                assert len(verdict.tokens) == 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_behind_the_end_of_a_grammar(rule, temperature):
    """Ids 1 and 0 (the end) are all that is allowed, then nothing is; drafts of every length go on
    with junk, right or wrong before it."""
    x, every = torch.zeros(6, 5), set(range(5))
    allowed = [{1}, {0}, set(), set(), set(), set()]
    for drafts in ([], [1], [1, 0], [1, 0, 4], [1, 0, 4, 0, 4], [3], [1, 4], [3, 0, 4], [1, 3, 0]):
        n = len(drafts)
        rows = [row(3, 4 + at, temperature, tuple(every - allowed[at])) for at in range(n + 1)]
        scores = torch.full((n, 5), -40.0).double()
        scores[range(n), drafts] = 0.0
        (verdict,) = judge(x[: n + 1], rows, [drafts], scores, rule)
        stands = next((at for at, y in enumerate(drafts[:2]) if y != at ^ 1), min(n, 2))
        assert verdict.accepted == stands
        assert verdict.tokens == (1, 0)[: stands + 1]
        assert verdict.broken == (stands == 2)


def test_redraw_takes_what_the_draft_lacks_and_nothing_else():
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.5, 0.0, 0.4]], dtype=torch.float64)
    draws = (torch.arange(6000, dtype=torch.float64) + 0.5) / 6000
    ids = verify.redraw(p.expand(6000, 4), q.expand(6000, 4), draws)
    assert torch.bincount(ids, minlength=4).tolist() == [4000, 0, 2000, 0]
    same = verify.redraw(p.expand(6000, 4), p.expand(6000, 4), draws)
    assert torch.bincount(same, minlength=4).tolist() == [3000, 1800, 1200, 0]
    edges = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert verify.redraw(p.expand(2, 4), q.expand(2, 4), edges).tolist() == [0, 2]
    p, q = p.flip(-1), q.flip(-1)  # the first token has nothing left
    assert verify.redraw(p.expand(2, 4), q.expand(2, 4), edges).tolist() == [1, 3]


def test_accepts_is_exact():
    p = torch.tensor([[0.25, 0.75]], dtype=torch.float64).expand(4000, 2)
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64).expand(4000, 2)
    draws = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    zeros = torch.zeros(4000, dtype=torch.int64)
    assert int(verify.accepts(p, q, zeros, draws).sum()) == 2000
    assert bool(verify.accepts(p, q, zeros + 1, draws).all())
    assert not bool(verify.accepts(p, q, zeros - 1, draws).any())


def test_probabilities_are_softmax_and_do_not_see_neighbours():
    x = torch.from_numpy(rng.gumbel(1, 5000)).reshape(5, 1000) * 3
    x[2, ::3] = -math.inf
    p = verify.probabilities(x)
    assert torch.allclose(p, torch.softmax(x, -1), atol=1e-12, rtol=1e-9)
    for at in range(5):
        assert torch.equal(verify.probabilities(x[at : at + 1])[0], p[at])


def test_rows_must_fit():
    x, rows, drafts, scores = batch()
    with pytest.raises(ValueError, match="rows named"):
        judge(x[1:], rows, drafts, scores, "rejection")


def void(x, rows, drafts, seed):
    """The same batch in other rows: more were allotted, some follow no request, and all of these
    are not finite or would give another answer. Gives first, x, rows."""
    generator = np.random.default_rng(seed)
    first, out_x, out_rows, at = [], [], [], 0
    for r in generator.permutation(len(drafts)):
        at = sum(len(ids) + 1 for ids in drafts[:r])
        first.append((r, len(out_rows)))
        for row_ in range(at, at + len(drafts[r]) + 1):
            out_x.append(x[row_])
            out_rows.append(rows[row_])
        for _ in range(generator.integers(0, 4)):
            out_x.append(x[generator.integers(len(x))] * generator.choice([1.0, math.nan]))
            out_rows.append(rows[generator.integers(len(rows))])
    return torch.tensor([place for _, place in sorted(first)]), torch.stack(out_x), out_rows


@pytest.mark.parametrize("rule", RULES)
def test_void_rows_and_void_drafts_are_ignored(rule):
    """Requests in any order of rows, more rows than shares, drafts behind the share, ids that look
    right among them, scores that are no numbers, room for more tokens than drafts."""
    for seed in range(4):
        x, rows, drafts, scores = batch(seed, rule=rule)
        wanted = judge(x, rows, drafts, scores, rule)
        for more in range(3):
            place, wide_x, wide_rows = void(x, rows, drafts, seed * 3 + more)
            _, ids, shares, cells = laid_out(drafts, scores, x.shape[-1], 5 + more, junk=more - 1)
            for r, ids_ in enumerate(drafts):
                if len(ids_) < ids.shape[1]:  # what the target itself would choose there
                    ids[r, len(ids_)] = wanted[r].tokens[-1]
            for most in (6, 9):
                got = verify.verify(
                    wide_x, Rows.of(wide_rows, "cpu"), place, ids, shares, cells, rule, most
                )
                assert verdicts(got) == wanted
                rest = [[-1] * (most - len(verdict.tokens)) for verdict in wanted]
                assert got.tokens.tolist() == [
                    [*verdict.tokens, *some] for verdict, some in zip(wanted, rest, strict=True)
                ]


@pytest.mark.parametrize("rule", RULES)
def test_no_room_for_drafts_and_nobody_there(rule):
    x, rows, drafts, _ = batch()
    starts = torch.tensor([0, *np.cumsum([len(ids) + 1 for ids in drafts])[:-1].tolist()])
    none = torch.zeros(len(drafts), dtype=torch.int64)
    plain = sampler.sample(x, Rows.of(rows, "cpu"))[starts]
    for wide in (0, 3):
        ids = none[:, None].expand(-1, wide)
        for scores in (None, torch.full((len(none), wide, x.shape[1]), math.nan).double()):
            for most in (1, 4):
                got = verify.verify(
                    x, Rows.of(rows, "cpu"), starts, ids, none, scores, rule, most
                )  # fmt: skip
                assert got.tokens[:, 0].tolist() == plain.tolist()
                assert (got.tokens[:, 1:] == -1).all() and not got.accepted.any()
    got = verify.verify(x[:0], Rows.of([], "cpu"), none[:0], ids[:0], none[:0], None, rule, 4)
    assert got.tokens.shape == (0, 4) and verdicts(got) == []


@pytest.mark.parametrize("rule", RULES)
def test_requests_of_every_kind_in_one_batch(rule):
    """Greedy, sampled, cut, penalised, biased and forbidding requests, one broken row: each as
    alone."""
    kinds = [
        {"temperature": 0.0}, {}, {"temperature": 0.0, "logit_bias": {3: 4.0}}, {"top_p": 0.8},
        {"repetition_penalty": 1.4, "presence_penalty": 0.3}, {"min_p": 0.1, "top_k": 30}, {},
    ]  # fmt: skip
    target, far = language(5, 60), language(6, 60)
    x, rows, drafts, scores = [], [], [], []
    for r, kind in enumerate(kinds):
        params, ids = SamplingParams(**kind), []
        for slot in range(4):
            more = {"forbidden": (1, 2) if slot < 2 else (), "seen": (4, 5)} if r % 2 else {}
            counts = {token: 1 for token in ids}
            x.append(target((r, *ids)))
            rows.append(Row(params, r, 8 + slot, counts=counts, **more))
            if slot < 3:
                mix = x[-1] + 0.3 * far((r, *ids))
                some, given = propose(mix[None], rows[-1:], slot, rule)
                ids += some
                scores.append(mix.double() if given is None else given[0])
        drafts.append(ids)
    x, scores = torch.stack(x), torch.stack(scores)
    x[6 * 4, 7] = math.nan
    together = judge(x, rows, drafts, scores, rule)
    assert together == one_by_one(x, rows, drafts, scores, rule)
    assert together[6] == Verdict(0, (), broken=True)
    assert sum(verdict.accepted for verdict in together) > 3


def test_drafts_of_another_attempt_have_other_noise():
    x = torch.zeros(4, 500)
    rows = [Row(parameters(), 7, 5, attempt=attempt) for attempt in (0, 1, 2, 0)]
    ids, scores = propose(x, rows, 2, "rejection")
    assert ids[0] == ids[3] and len(set(ids)) == 3
    for token, one in zip(ids, rows, strict=True):
        stream = rng.key(7, 5, verify.draft_purpose(2, one.attempt))
        assert token == int(np.argmax(scores[0].numpy() + rng.gumbel(stream, 500)))
    assert len(set(propose(x, rows, 2, "coupled")[0])) == 1


@pytest.mark.parametrize("rule", RULES)
def test_the_host_waits_for_nothing(rule, monkeypatch):
    monkeypatch.setattr(logits_module, "_readable", lambda x: False)
    x, rows, drafts, scores = batch(rule=rule)
    first, ids, shares, cells = laid_out(drafts, scores, x.shape[-1])
    biased = [Row(parameters(), 3, 4, (1, 2)), *rows[1:]]
    with no_sync("cpu"):
        for some in (rows, biased):
            named = Rows.of(some, "cpu")
            verify.verify(x, named, first, ids, shares, cells, rule, 6)
            verify.verify(x, named, first, ids[:, :0], shares * 0, None, rule, 6)
            verify.propose(x, named, 1, rule)
    with pytest.raises(RuntimeError), no_sync("cpu"):
        verdicts(verify.verify(x, named, first, ids, shares, cells, rule, 6))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", RULES)
def test_a_device_judges_as_the_host_and_is_not_waited_for(rule):
    x, rows, drafts, scores = batch(rule=rule)
    laid = laid_out(drafts, scores, x.shape[-1])
    wanted = verify.verify(x, Rows.of(rows, "cpu"), *laid, rule, 6)
    proposed = verify.propose(x, Rows.of(rows, "cpu"), 1, rule)[0]
    there, named = [part.cuda() for part in (x, *laid)], Rows.of(rows, "cuda")
    verify.verify(there[0], named, *there[1:], rule, 6)  # first uses may wait
    with no_sync("cuda"):
        got = verify.verify(there[0], named, *there[1:], rule, 6)
        ids, _ = verify.propose(there[0], named, 1, rule)
    assert verdicts(got) == verdicts(wanted)
    assert ids.cpu().tolist() == proposed.tolist()
