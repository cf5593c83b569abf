"""The command line around a scripted model: `python fake_llm.py ARGUMENTS...`.

FAKE_PIECES (JSON list of texts) is what it says, FAKE_DELAY the seconds before each piece,
FAKE_FAIL the name of an exception to raise after the pieces.
"""

from __future__ import annotations

import json
import os
import sys
import time

import deepinfer
from deepinfer.core.request import Completion, FinishReason, Timing, Usage
from deepinfer.core.step import TokenDelta
from deepinfer.errors import CapacityError


class FakeLLM:
    """Says the pieces; remembers what it was asked."""

    pieces: list[str] = ["one ", "two\n"]
    delay = 0.0
    failure: BaseException | None = None
    warning = ""
    asked: dict = {}

    @classmethod
    def from_settings(cls, settings, on_warning=None):
        llm = cls()
        llm.settings = settings
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
