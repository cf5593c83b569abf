"""Prefix reuse without a model: what others can find is what its name says, at every moment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kvcache.tiers import HostTier
from deepinfer.replay import ReplayRule
from tests.unit.simulated import Bench, DictTier

ROOTS = [[(7 * root + at * at) % 5 for at in range(60)] for root in range(3)]


@st.composite
def rules(draw):
    window = draw(st.integers(1, 9))
    mode = draw(st.sampled_from(["off", "mask", "compact"]))
    keep = 0 if mode == "off" else draw(st.integers(window, window + 9))
    return ReplayRule(layers=4, boundary=2, window=window, mode=mode, keep=keep)


TIERS = [(), ("host",), ("small",), ("host", "disk"), ("small", "disk"), ("lossy",)]


@st.composite
def benches(draw):
    size = draw(st.sampled_from([1, 2, 4, 8]))
    tiers = draw(st.sampled_from(TIERS))
    room = {"small": 8 * size * 3, "host": 8 * size * 500}
    made = tuple(
        HostTier(room[kind]) if kind in room else DictTier(losing=3 * (kind == "lossy"))
        for kind in tiers
    )
    slots = draw(st.integers(1, 4))
    return Bench(
        size=size,
        pages=draw(st.integers(-(-48 // size), -(-120 // size))),
        windows=draw(st.integers(0, 60 // size)),
        slots=slots,
        max_rows=draw(st.integers(1, 40)),
        chunk=draw(st.integers(1, 40)),
        rule=draw(rules()),
        tiers=made,
        durable=made[1] if "disk" in tiers else None,
        replay=draw(st.booleans()),
        context=draw(st.integers(0, 2)),
    )


asked = st.tuples(
    st.just("add"), st.integers(0, 2), st.integers(1, 40), st.lists(st.integers(0, 1), max_size=6),
    st.integers(1, 14), st.integers(0, 9),
)  # fmt: skip
again = st.tuples(st.just("again"), st.integers(0, 99), st.integers(0, 5), st.integers(1, 9))
moves = st.lists(
    asked | again | st.tuples(st.sampled_from(["steps", "abort", "fail", "broken"]),
                              st.integers(0, 9)),
    min_size=1, max_size=25,
)  # fmt: skip


def play(bench, script):
    for move, *values in script:
        if move == "add":
            root, length, tail, new, kind = values
            bench.add(ROOTS[root][:length] + tail, new, full=kind == 0)
        elif move == "again" and bench.done:
            which, more, new = values
            old = bench.done[which % len(bench.done)]
            bench.add((old.tokens + ROOTS[which % 3][:more])[:46], new)
        elif move == "steps":
            for _ in range(values[0]):
                bench.step()
        elif move == "abort" and bench.open:
            bench.end(bench.open[values[0] % len(bench.open)])
            bench.check()
        elif move == "fail" and bench.open:
            bench.step(fails=values[0])
        elif move == "broken" and bench.open:
            bench.step(broken=values[0] % 3)
    return bench.run()


@settings(max_examples=150, deadline=None)
@given(benches(), moves)
def test_whatever_happens_pages_hold_what_their_names_say(bench, script):
    """Aborts, errors in mid-step, numbers that are not finite, preemption, tiers that lose pages:
    the simulated device checks every row, name, owner and payload after every step."""
    play(bench, script)
    assert bench.idle


@settings(max_examples=70, deadline=None)
@given(benches(), moves)
def test_with_no_accident_nobody_is_preempted_for_ever(bench, script):
    """Sharing changes what a request needs; bounded waste and progress stay."""
    play(bench, [move for move in script if move[0] in ("add", "again", "steps")])
    assert bench.idle and all(sequence.preemptions <= 3 for sequence in bench.done)


@settings(max_examples=70, deadline=None)
@given(
    rules(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 50), st.integers(1, 30),
    st.integers(1, 40), st.integers(0, 20),
)  # fmt: skip
def test_windows_kept_and_resume_points_are_those_of_the_specification(
    rule, size, length, new, chunk, more
):
    """W + P * ceil(K / P) rows before the last page edge of the prompt and of the answer; the same
    prompt resumes at the largest edge H <= L - K, the next turn at the largest with rows."""
    bench = Bench(pages=-(-260 // size), windows=-(-260 // size), size=size, chunk=chunk, rule=rule)
    first = bench.ask(ROOTS[0][:length], new)
    keep = rule.keep if rule.mode != "off" else 1
    count = -(-rule.window // size) + -(-keep // size)
    prompt, answer = length // size, (length + new - 1) // size
    kept = {*range(max(prompt - count, 0), prompt), *range(max(answer - count, prompt), answer)}
    assert set(bench.found("windows", first)) == kept
    assert bench.found("entries", first) == list(range(answer))

    halo = -(-rule.window // size)
    for tokens in (ROOTS[0][:length], first.tokens + [1] * more):
        latest = max(len(tokens) - keep, 0) // size
        best = max(
            h for h in range(min(latest, answer) + 1)
            if h == 0 or {*range(max(h - halo, 0), h)} <= kept
        )  # fmt: skip
        if tokens == ROOTS[0][:length]:
            assert best == latest, "what is kept before the end of a prompt is enough for it"
        again = bench.ask(tokens, 1)
        assert bench.cached[again] == best * size
    assert bench.idle


RULE = ReplayRule(layers=4, boundary=2, window=4, mode="compact", keep=4)


def test_other_tokens_anywhere_before_find_nothing():
    bench = Bench(rule=RULE)
    bench.ask(range(24))
    for at, cached in ((0, 0), (3, 0), (4, 0), (23, 20)):
        tokens = list(range(24))
        tokens[at] = 99
        assert bench.cached[bench.ask(tokens)] == cached, at


def test_a_request_that_needs_every_row_shares_but_does_not_resume():
    bench = Bench(rule=RULE)
    first = bench.ask(range(24), full=True)
    assert bench.cached[first] == 0 and bench.found("entries", first) == list(range(6))
    assert bench.cached[bench.ask(range(24), full=True)] == 0
    assert bench.cached[bench.ask(range(24))] == 20


def test_switched_off_it_names_and_finds_nothing():
    bench = Bench(rule=RULE, enabled=False)
    first = bench.ask(range(24), 9)
    assert bench.found("entries", first) == bench.found("windows", first) == []
    assert bench.cached[bench.ask(range(24))] == 0 and bench.idle


def test_an_older_prompt_goes_before_a_newer_and_its_tail_first():
    bench = Bench(pages=16, windows=40, rule=RULE)
    old, new = bench.ask(range(24)), bench.ask(range(100, 124))
    bench.prefix.entries.take(4)  # the rest of the pool
    for taken in range(1, 13):
        bench.prefix.entries.take(1)
        assert bench.found("entries", old) == list(range(max(6 - taken, 0)))
        assert bench.found("entries", new) == list(range(min(12 - taken, 6)))


def test_a_hit_keeps_a_prompt_alive():
    bench = Bench(pages=16, windows=40, rule=RULE)
    old, new = bench.ask(range(24)), bench.ask(range(100, 124))
    bench.ask(range(24))  # shares five pages and computes the sixth again
    bench.prefix.entries.take(4 + 1 + 4)
    assert bench.found("entries", old) == list(range(5))
    assert bench.found("entries", new) == [0, 1]


def test_what_the_device_lost_comes_back_from_a_tier():
    host = HostTier(1 << 20)
    bench = Bench(pages=7, windows=4, rule=RULE, tiers=(host,))
    bench.ask(range(24))
    bench.ask(range(100, 124))
    first = bench.ask(range(24))
    assert bench.cached[first] == 20 and bench.idle


@pytest.mark.parametrize("kind", ["entries", "windows"])
def test_a_page_lost_between_the_look_and_the_read_is_a_miss(kind):
    """Nothing stays shared of the attempt that failed."""
    tier = DictTier()
    bench = Bench(rule=RULE, tiers=(tier,), durable=tier)
    first = bench.ask(range(24))
    bench.prefix._pools[kind].forget()
    names, get = first.names, tier.get

    def loses(key):
        if key == (kind, names[5]):
            tier.pages.pop(key, None)
        return get(key)

    tier.get = loses
    bench.lossless = False
    again = bench.ask(range(32))
    assert bench.cached[again] == 20 and bench.idle, "one page before it has all its rows"


def test_equal_prompts_that_load_the_same_pages_at_once():
    tier = DictTier()
    bench = Bench(pages=40, rule=RULE, tiers=(tier,), durable=tier)
    bench.ask(range(24))
    for pool in bench.prefix._pools.values():
        pool.forget()
    twins = [bench.add(range(24)) for _ in range(2)]
    bench.run()
    assert [bench.cached[twin] for twin in twins] == [20, 20] and bench.idle


def test_a_resume_that_never_runs_gives_its_pages_back_without_a_name():
    tier = DictTier()
    bench = Bench(rule=RULE, tiers=(tier,), durable=tier)
    first = bench.ask(range(24))
    for pool in bench.prefix._pools.values():
        pool.forget()
    second = bench.add(range(24))
    bench.step(fails=0)
    assert second.preemptions == 1 and bench.idle is False and not second.restore
    assert bench.found("entries", first) == bench.found("windows", first) == []
    bench.end(second)
    assert bench.idle


def test_half_a_page_has_no_name():
    bench = Bench(rule=RULE, chunk=6)
    sequence = bench.add(range(24))
    bench.step()
    bench.settle()
    bench.end(sequence)
    assert bench.found("entries", sequence) == [0]
    sequence = bench.add(range(24))
    bench.step(fails=5)
    assert bench.found("entries", sequence) == [0]
    bench.run()
    assert bench.found("entries", sequence) == list(range(6)) and bench.idle


def test_a_sequence_that_is_not_finite_leaves_nothing_on_the_device():
    bench = Bench(rule=RULE, chunk=8)
    sequence = bench.add(range(24))
    bench.step()
    bench.settle()
    assert bench.found("entries", sequence) == [0, 1]
    bench.step(broken=0)
    bench.settle()
    assert bench.found("entries", sequence) == bench.found("windows", sequence) == []
    assert bench.idle


def test_an_encoder_replay_is_chosen_only_where_it_saves_rows_and_stays_private():
    bench = Bench(rule=RULE, replay=True, windows=40)
    first = bench.ask(range(24))
    bench.prefix.windows.drop(first.names[5])
    assert bench.cached[bench.ask(range(32))] == 20, "4 rows to save, 4 to replay: no"
    bench.prefix.windows.forget()
    second = bench.add([*range(24), *range(50, 70)])
    bench.run()
    assert bench.cached[second] == 24 and bench.device.approximate == 4 + 20
    assert bench.found("entries", second) == list(range(6))
    assert bench.found("windows", second) == [] and bench.idle


def test_alone_knows_nothing_and_keeps_nothing_elsewhere():
    tier = DictTier()
    bench = Bench(rule=RULE, tiers=(tier,), durable=tier)
    bench.ask(range(24))
    kept = dict(tier.pages)
    with bench.prefix.alone():
        assert bench.cached[bench.ask(range(24), 9)] == 0
        assert bench.cached[bench.ask(range(24))] == 20
    assert tier.pages == kept
    assert bench.prefix.tiers == (tier,) and bench.prefix.durable is tier
    for pool in bench.prefix._pools.values():
        pool.forget()
    assert bench.cached[bench.ask(range(24))] == 20, "what was kept before is known again"


def test_without_room_for_a_window_a_request_does_without():
    for windows in range(6):
        bench = Bench(rule=RULE, windows=windows)
        cached = [bench.cached[bench.ask(range(24), 6)] for _ in range(3)]
        assert set(cached) <= {0, 20} and bench.idle
    assert cached == [0, 20, 20]


def lost(bench):
    """The device knows nothing any more, the tiers do."""
    for pool in bench.prefix._pools.values():
        pool.forget()


def test_a_hit_that_must_be_loaded_waits_for_its_pages():
    tier = DictTier()
    bench = Bench(pages=7, rule=RULE, tiers=(tier,), durable=tier)
    bench.ask(range(24))
    lost(bench)
    talker = bench.add(range(100, 105), 3)
    bench.step()
    waits = bench.add(range(24))
    bench.step()
    assert len(talker.pages) == 2 and waits.slot is None, "6 pages wanted, 5 are free"
    bench.run()
    assert bench.cached[waits] == 20 and bench.idle


def test_a_hit_takes_no_more_window_pages_than_there_are():
    tier = DictTier()
    rule = ReplayRule(layers=4, boundary=2, window=8, mode="compact", keep=8)
    bench = Bench(windows=4, rule=rule, tiers=(tier,), durable=tier)
    bench.ask(range(24))
    lost(bench)
    held = bench.prefix.windows.take(3)
    again = bench.add(range(24))
    assert bench.prefix.find(again).plan.cached == 0, "two pages of rows, room for one"
    bench.prefix.windows.give_back(held)
    bench.run()
    assert bench.cached[again] == 16 and bench.idle


def test_pages_computed_again_are_found_again():
    bench = Bench(rule=RULE, chunk=8)
    sequence = bench.add(range(24))
    bench.step()
    lost(bench)
    bench.step(fails=0)
    bench.run()
    assert sequence.preemptions == 1
    assert bench.found("entries", sequence) == list(range(6)) and bench.idle


SMALL = ReplayRule(layers=4, boundary=2, window=4, mode="compact", keep=4)


def test_a_preempted_answer_is_not_persisted_from_a_page_that_was_taken():
    host, disk = DictTier(), DictTier()
    bench = Bench(pages=14, windows=3, slots=3, rule=SMALL, tiers=(host, disk), durable=disk)
    bench.add(range(8), 30)
    new = bench.add(range(100, 108), 30)
    bench.run()
    assert new.preemptions and bench.idle


def with_disk(**more):
    disk = DictTier()
    return Bench(
        pages=14, windows=9, size=4, slots=3, rule=SMALL, tiers=(disk,), durable=disk, **more
    ), disk


def test_a_tier_that_is_interrupted_leaks_nothing():
    bench, disk = with_disk()
    bench.ask(range(24))
    bench.prefix.windows.forget()
    bench.add(range(24))

    def interrupted(key):
        raise KeyboardInterrupt

    get, disk.get = disk.get, interrupted
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    disk.get = get
    bench.run()
    assert bench.idle


def test_a_step_that_was_planned_and_never_ran():
    bench, _ = with_disk()
    bench.ask(range(24))
    bench.prefix.windows.forget()
    bench.prefix.entries.forget()
    bench.add(range(24))
    assert bench.policy.next_step().plan.loads, "they are lost"
    bench.start_afresh()
    bench.run()
    assert bench.idle


def test_numbers_that_are_not_finite_are_found_nowhere():
    bench, disk = with_disk(chunk=8)
    bench.add(range(24))
    bench.step()
    bench.step()
    assert disk.pages
    bench.step(broken=0)
    bench.settle()
    assert not disk.pages
    again = bench.ask(range(24))
    assert bench.cached[again] == 0 and bench.found("entries", again), "it was computed anew"
    assert bench.cached[bench.ask(range(24))] > 0


def test_who_shares_pages_that_are_not_finite_cannot_bring_them_back():
    """One bad row, and the prompt that all share is computed once more: by the next who comes."""
    bench = Bench(pages=40, windows=40, rule=RULE)
    bench.ask([*range(32), 90])
    sharer, bad = bench.add([*range(32), 91], 8), bench.add([*range(32), 92], 8)
    bench.step()
    bench.step(broken=1)
    bench.step()
    assert bench.cached[sharer] == bench.cached[bad] > 0 and bad not in bench.open
    shared = bench.cached[sharer] // bench.prefix._size
    assert not {*range(shared)} & {*bench.found("entries", sharer)}
    bench.run()
    assert bench.cached[bench.ask([*range(32), 93])] == 0, "nothing of it is found"
    assert bench.cached[bench.ask([*range(32), 94])] > 0, "but what is computed anew"
    assert bench.idle and not any(pool._spoilt for pool in bench.prefix._pools.values())


def test_an_answer_drops_its_own_window_rows_alone():
    bench = Bench(pages=40, windows=24, size=4, slots=3, rule=SMALL)
    ids = bench.ask(range(8), 20).tokens
    other = bench.ask(ids[:20])  # a prompt that ends inside the answer
    kept = bench.found("windows", other)
    bench.ask(range(8), 40)
    assert kept and set(kept) <= set(bench.found("windows", other))


def test_window_rows_that_are_known_take_no_page():
    bench = Bench(pages=40, windows=24, size=4, slots=3, rule=SMALL)
    bench.ask(range(8), 1)
    bench.add(range(8), 1, full=True)
    assert bench.policy.next_step().plan.chunks[0].windows == ()


def test_a_request_that_waits_for_room_reads_nothing():
    bench, disk = with_disk()
    bench.ask(range(40))
    bench.prefix.entries.forget()
    bench.lossless = False  # the check of each resume point would read, too
    bench.add(range(100, 120), 12)
    bench.step()
    bench.add(range(40), 1)
    for _ in range(8):
        bench.step()
        assert len(bench.policy.running) == 1 and not disk.gets
    bench.run()
    assert disk.gets
