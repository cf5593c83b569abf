"""The command line around a scripted model: `python fake_llm.py ARGUMENTS...`.

FAKE_PIECES (JSON list of texts) is what it says, FAKE_DELAY the seconds before each piece,
FAKE_FAIL the name of an exception to raise after the pieces. To requests of a chat or a batch it
says what follows from prompt and seed: see `Echo`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import deque
from types import SimpleNamespace

import deepinfer
from deepinfer.core.request import Completion, FinishReason, Problem, Timing, Usage
from deepinfer.core.step import TokenDelta
from deepinfer.errors import CapacityError


class Echo:
    """One call of a flow: FAKE_PIECES, else a text that follows from its prompt and seed, one token
    a step. A prompt of over 1,000 tokens fails."""

    def __init__(self, llm, prompts, params, follow):
        self.llm, self.params, self.follow = llm, params, follow
        many = isinstance(prompts, list) and prompts and not isinstance(prompts[0], int)
        [self.prompt] = prompts if many else [prompts]
        self.seed = params.seq_seed if params.seq_seed is not None else params.seed or 0
        named = hashlib.blake2b(repr((self.prompt, self.seed)).encode(), digest_size=4)
        text = "".join(llm.pieces) if llm.said else f"said {named.hexdigest()}"
        ids = llm.parts.tokenizer.encode_plain(text)[: params.max_tokens]
        self.cut = len(ids) == params.max_tokens
        self.ids = ids if self.cut else [*ids, 1]
        self.done, self.open, self.deltas = 0, 1, deque()
        self.answers = [SimpleNamespace(result=None)]

    def step(self):
        if len(self.prompt) > 1000:
            problem = Problem("prompt-too-long", "it is too long", exit_status=5)
            return self.finish(FinishReason.ERROR, problem)
        self.done += 1
        over = self.done >= len(self.ids)
        new = tuple(self.ids[self.done - 1 : self.done])
        if over:
            self.finish(FinishReason.LENGTH if self.cut else FinishReason.STOP)
        if self.follow:
            self.deltas.append(TokenDelta(0, 0, new, "", result=self.answers[0].result))

    def finish(self, reason, problem=None):
        self.open = 0
        made = tuple(self.ids[: self.done])
        self.answers[0].result = Completion(
            0, 0, "", made, reason, Usage(len(self.prompt), 0, 0, 0, len(made)), Timing(),
            self.seed, False, self.llm.settings.as_json(), error=problem,
        )  # fmt: skip
        if self.follow and problem:
            self.deltas.append(TokenDelta(0, 0, (), "", result=self.answers[0].result))


class FakeLLM:
    """Says the pieces; remembers what it was asked."""

    pieces: list[str] = ["one ", "two\n"]
    delay = 0.0
    failure: BaseException | None = None
    warning = ""
    asked: dict = {}
    said = False
    slots = 4

    @classmethod
    def from_settings(cls, settings, on_warning=None):
        from deepinfer.engine.assembly import embedded_model
        from deepinfer.tokenizer.tokenizer import Tokenizer

        llm = cls()
        llm.settings = settings
        llm.calls = []
        llm._parts = SimpleNamespace(
            tokenizer=Tokenizer(embedded_model() / "tokenizer.json", 0, 4096),
            eos_ids=(1,), sizes=SimpleNamespace(slots=cls.slots),
        )  # fmt: skip
        cls.asked = {"settings": settings, "closed": False}
        if cls.warning:
            on_warning(cls.warning)
        for line in settings.warnings:
            on_warning(line)
        return llm

    def stream(self, prompts, sampling_params):
        type(self).asked |= {"prompt": prompts, "params": sampling_params}
        made = 0
        for piece in self.pieces[:-1]:
            time.sleep(self.delay)
            made += 1
            yield TokenDelta(0, 0, (made,), piece)
        if self.failure is not None:
            raise self.failure
        time.sleep(self.delay)
        yield TokenDelta(0, 0, (made + 1,), self.pieces[-1], result=self._result(sampling_params))

    @property
    def parts(self):
        return self._parts

    def flow(self):
        from deepinfer.engine.flow import Flow

        return Flow(self)

    def open_call(self, prompts, params, follow):
        call = Echo(self, prompts, params, follow)
        self.calls.append(call)
        seen = type(self).asked.setdefault("flow", [])
        seen.append((prompts, params))
        return call

    def run_step(self):
        time.sleep(self.delay)
        running = [call for call in self.calls if call.open][: self.slots]
        if self.failure is not None:
            raise self.failure
        for call in running:
            call.step()
        self.calls = [call for call in self.calls if call.open]

    def end_call(self, call):
        if call.open:
            call.finish(FinishReason.ABORT)

    def _result(self, params):
        return Completion(
            index=0,
            sample=0,
            text="".join(self.pieces),
            token_ids=tuple(range(1, len(self.pieces) + 1)),
            finish_reason=FinishReason.STOP,
            usage=Usage(9120, 8192, 0, 928, len(self.pieces)),
            timing_ms=Timing(1.0, 412.0, 1000.0),
            seed=params.seq_seed if isinstance(params.seq_seed, int) else 18446,
            batch_invariant=False,
            settings=self.settings.as_json(),
            complete=None if params.structured is None else False,
        )

    def close(self):
        type(self).asked["closed"] = True


FAILURES = {
    "capacity": lambda: CapacityError("kv-too-small", "it does not fit", ["0 fit"], "smaller"),
    "bug": lambda: ZeroDivisionError("division by zero"),
    "memory": lambda: type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory\nmore"),
}


def main() -> int:
    from deepinfer.cli.main import main as command_line

    FakeLLM.said = "FAKE_PIECES" in os.environ
    FakeLLM.pieces = json.loads(os.environ.get("FAKE_PIECES", "null")) or FakeLLM.pieces
    FakeLLM.delay = float(os.environ.get("FAKE_DELAY", "0"))
    if os.environ.get("FAKE_FAIL"):
        FakeLLM.failure = FAILURES[os.environ["FAKE_FAIL"]]()
    deepinfer.LLM = FakeLLM
    status = command_line()
    if os.environ.get("FAKE_REPORT"):
        seen = {k: str(v) for k, v in FakeLLM.asked.items()}
        seen["prompt"] = FakeLLM.asked.get("prompt")
        with open(os.environ["FAKE_REPORT"], "w") as file:
            json.dump(seen, file)
    return status


if __name__ == "__main__":
    sys.exit(main())
