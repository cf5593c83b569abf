"""An exchange on a scripted flow: what an error in a step means for an answer."""

from types import SimpleNamespace

import pytest

from deepinfer.core.request import Completion, FinishReason, Problem, Timing, Usage
from deepinfer.core.step import TokenDelta
from deepinfer.engine.exchange import Exchange
from deepinfer.engine.flow import Made
from tests.unit.exchanges import MARK, body, frontend, ids, neutral

CALL = f'<{MARK} invoke name="other">\n</{MARK} invoke>\n'
ENDED = {
    "stop": ("chat", "Hello STOP more", {"stop": ["STOP"]}, "Hello "),
    "stop_sequences": ("messages", "Hello STOP more", {"stop_sequences": ["STOP"]}, "Hello "),
    "calls": ("chat", f"Hello\n\n<{MARK} calls>\n{CALL}</{MARK} calls> more", {"tools": True},
              "Hello"),
}  # fmt: skip


def news_of(kind, text, asked):
    """What is told of an answer whose only step made `text` and failed behind it."""
    made, problem = tuple(ids(text)), Problem("logits-not-finite", "a NaN")
    result = Completion(
        0, 0, text, made, FinishReason.ERROR, Usage(9, 0, 0, 9, len(made)), Timing(), 5, False, {},
        error=problem,
    )  # fmt: skip
    delta = TokenDelta(0, 0, made, text, result=result)
    flow = SimpleNamespace(
        submit=lambda *_, **__: None, step=lambda: iter([Made("a", (delta,), (result,))])
    )
    reader = frontend()
    llm = SimpleNamespace(flow=lambda: flow, parts=SimpleNamespace(eos_ids=(1,)))
    exchange = Exchange(llm, reader)
    exchange.submit("a", reader.read(kind, body(kind, **asked)), "id-1", follow=True)
    [news] = exchange.step()
    assert not len(exchange)
    return news


@pytest.mark.parametrize("end", ENDED)
def test_an_error_behind_the_end_of_an_answer_is_none_of_it(end):
    kind, text, asked, said = ENDED[end]
    news = news_of(kind, text, asked)
    assert news.problem is None and neutral(kind, news.document)["text"] == said
    completion = news.completion
    assert completion.finish_reason is FinishReason.STOP and completion.error is None
    assert len(completion.token_ids) < len(ids(text)) and news.events


@pytest.mark.parametrize("end", ENDED)
def test_an_error_before_the_end_of_an_answer_is_told(end):
    kind, text, asked, _ = ENDED[end]
    news = news_of(kind, text[:8], asked)
    assert news.document is None and news.problem.code == "logits-not-finite"
