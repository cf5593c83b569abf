"""The proof of batch invariance on T6: the matrix, and that a broken promise is found and named."""

from __future__ import annotations

import itertools

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine import invariance
from deepinfer.engine.invariance import Cell, Check, Matrix
from deepinfer.errors import UsageError
from deepinfer.ops import registry
from tests import t6
from tests.engine.fakes import idle
from tests.planted import by_rows, plant

PROMISE = dict(batch_invariant=True, page_tokens=t6.PAGE_TOKENS, accelerator="cpu")
CUT = {**invariance.SETTINGS, **PROMISE, "swa_keep": t6.KEEP}


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("t6") / "m")


@pytest.fixture(scope="module")
def checked(floats):
    with LLM(floats, **CUT) as llm:
        yield Check(llm, invariance.subjects(llm, 8, tokens=3))
        assert idle(llm)


# the matrix


@pytest.mark.parametrize("speculation", invariance.SPECULATION)
def test_the_matrix_on_t6(checked, speculation):
    matrix = Matrix((1, 2, 9, 64), budgets=(24, None), chunks=(7, None), speculation=(speculation,))
    cells = matrix.sample(8)
    report = checked.run(cells, len(matrix.cells()))
    assert report.invariant and not report.failures, report.failures[0]
    assert report.cells == 8 and report.of == 4 * 3 * 2 * 2 * 2
    assert report.requests == sum(cell.batch for cell in cells)
    assert report.resumed > 10, "prefix hits were hits"
    assert (report.accepted > 0) == (speculation != "off")


def test_runs_alone_do_not_write_into_what_a_cell_resumes_from(checked):
    """Compositions share their pools."""
    checked._alone.clear()
    report = checked.run([Cell(3, hit=True), Cell(8, "reversed", hit=True)])
    assert report.invariant and report.resumed > 0, report.failures[0]


def test_samples_cover_pairs_of_values():
    matrix = Matrix((1, 2, 7, 64))
    whole = matrix.cells()
    assert len(whole) == 4 * 3 * 3 * 3 * 2 * 3 == len(set(whole))
    some = matrix.sample(12)
    assert len(set(some)) == 12 and set(some) <= set(whole) and some == matrix.sample(12)
    assert invariance.pairs_of(whole) == matrix.pairs()
    assert invariance.pairs_of(some) >= 0.9 * matrix.pairs()
    assert invariance.pairs_of(Matrix().sample(192)) == Matrix().pairs()
    assert set(matrix.sample(10**6)) == set(whole)


def test_what_an_engine_cannot_do_is_left_out(tmp_path):
    folder = t6.write(tmp_path / "m", draft=False)
    with LLM(folder, **{**PROMISE, "max_num_seqs": 9}, prefix_cache=False) as llm:
        matrix = Check(llm, invariance.subjects(llm, 1)).possible(Matrix())
    assert matrix.speculation == ("off",) and matrix.hits == (False,)
    assert list(matrix.batches) == list(range(1, 10))


# a broken promise


def wrong_from(real, place):
    """An op that gives rows from `place` on something else."""

    def op(x, *rest):
        result = real(x, *rest)
        first = result[0] if isinstance(result, tuple) else result
        first[place:] *= -1
        return result

    return op


def broken(folder, op, cells):
    with LLM(folder, **CUT, backend={op: "planted"}) as llm:
        return Check(llm, invariance.subjects(llm, 8, tokens=3)).run(cells)


def test_a_sum_that_depends_on_the_rows_is_found_and_named(floats, monkeypatch):
    plant(monkeypatch, "linear", by_rows)
    report = broken(floats, "linear", [Cell(3), Cell(1, chunk=2), Cell(3, chunk=5, hit=True)])
    assert not report.invariant and len(report.failures) == 3
    first = report.failures[0]
    assert first.cell == Cell(1, chunk=2), "the plainest one"
    assert first.difference.op == "linear" and first.difference.where == "blocks.0.attention.wq_a"
    assert "first differing op: linear (blocks.0.attention.wq_a) on the row" in str(first)
    shown = report.as_json()
    assert shown["invariant"] is False and shown["cells"] == 3 and len(shown["failures"]) == 3
    assert shown["failures"][0]["op"] == "linear" and shown["failures"][0]["chunk"] == 2


@pytest.mark.parametrize(
    ("op", "where", "place"),
    [("hc_norm", "blocks.0.attn_norm", 9), ("pool", "blocks.1.attention.compressor.wgate", 5),
     ("hc_mix", "blocks.0.hc_attn.fn", 9), ("sparse_attention", "blocks.0.attention.sink", 9),
     ("moe", "blocks.0.ffn.experts.0", 9), ("choose", "blocks.1.attention.indexer", 1)],
)  # fmt: skip
def test_any_op_is_named_with_the_row(floats, monkeypatch, op, where, place):
    plant(monkeypatch, op, wrong_from(getattr(registry.build("cpu"), op), place))
    # The second dimension of a choice is a request's rows, the first one requests.
    report = broken(floats, op, [Cell(8) if op == "choose" else Cell(3, chunk=6)])
    found = report.failures[0].difference
    assert found.op == op and found.where.startswith(where), found
    assert found.position is not None or op == "choose"


def test_without_the_promise_the_mode_is_refused(floats, monkeypatch):
    plant(monkeypatch, "linear", by_rows, promised=False)
    with pytest.raises(UsageError) as caught:
        broken(floats, "linear", [])
    error = caught.value
    assert error.code == "invariant-unsupported" and error.exit_status == 2
    assert error.message == "batch-invariant mode is not available on cpu"
    assert error.facts[0] == "ops without a fixed-order version: linear"
    with LLM(floats, page_tokens=4, backend={"linear": "planted"}, accelerator="cpu") as llm:
        [result] = llm.generate([t6.prompt(4)], SamplingParams(max_tokens=1))
        assert result.batch_invariant is False


def test_a_difference_outside_the_ops_is_no_op_s_fault(checked, monkeypatch):
    """Logits that change behind the head."""
    forward, calls = checked.llm.parts.runner.forward, itertools.count()

    def shifted(*args):
        return forward(*args) + (next(calls) % 2) * 1e-3

    monkeypatch.setattr(checked.llm.parts.runner, "forward", shifted)
    checked._alone.clear()
    failure = checked.run([Cell(2)]).failures[0]
    assert failure.sought and failure.difference is None
    assert str(failure).endswith("no op differs on equal inputs")
    checked._alone.clear()


def test_runs_alone_that_fail_prove_nothing(floats):
    """Every answer is the same error: nothing was compared, so nothing was kept."""
    with LLM(floats, **CUT, kv_cache_tokens=4, mtp=0) as llm:
        report = Check(llm, invariance.subjects(llm, 3, tokens=3)).run([Cell(1), Cell(3)])
    assert not report.invariant and len(report.failures) == 2
    assert str(report.failures[0]) == (
        "1 forward, cold, speculation off: prompt 0 has no answer alone (kv-too-small)"
    )
    assert report.as_json()["failures"][0]["alone"] == "kv-too-small"
