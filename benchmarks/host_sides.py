"""The engines that `host_cost` compares: what the host does for a step, without a model.

A side takes requests and plans and commits steps whose tokens are made up; `Load` keeps a number of
them decoding and replaces those that end. Commands come in on stdin, counts and seconds go out on
stdout, a line each. The device half of a step is left out, and so are drafts. It runs in a peer's
own environment: nothing of deepinfer is imported but by `Ours`, and peers are used through their
public classes alone.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

PROMPT = 64  # tokens of the shortest prompt
LONG = 16_384  # tokens that fit into a step: all first prompts run in one
LIMIT = 8_192  # tokens of the longest sequence
WARM = 132  # steps before the first that counts: a page of ours and what a first step alone does
VOCAB, EOS, SAID = 1_000, 999, 500  # SAID: the token that is always chosen


class Side(Protocol):
    """page: tokens of a page. tokens: how many were made. `made` is work of the caller; `add`,
    `plan` and `commit` count."""

    page: int
    tokens: int

    def made(self, number: int, prompt: list[int], tokens: int) -> object: ...
    def add(self, made: object) -> None: ...
    def plan(self) -> object: ...
    def sampled(self, plan: object) -> object:
        """What the model would have answered."""

    def commit(self, plan: object, sampled: object) -> bool:
        """False: the same step goes on with another plan."""


class Ready:
    """Stands in for `engine.device.Device`: every step is over at once, each request that chooses
    got one token."""

    def __init__(self) -> None:
        import torch

        self.tokens = 0
        self._logits = torch.zeros(1, VOCAB)
        self._outcomes: dict[int, object] = {}

    def judge(self, step: object, drawing: object, told: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(step=step, logits=self._logits)

    def read(self, flight: types.SimpleNamespace) -> object:
        count = len(flight.step.choosing)
        self.tokens += count
        if count not in self._outcomes:
            self._outcomes[count] = _outcome(count)
        return self._outcomes[count]

    def forget(self) -> None: ...


def _outcome(count: int) -> object:
    import numpy as np

    from deepinfer.core.step import Outcome

    no = np.zeros(count, dtype=bool)
    return Outcome(np.full((count, 1), SAID), np.ones(count, dtype=np.int64), no, no)


class Ours:
    """`deepinfer.LLM` with its whole step: policy, prefix cache, log, answers. The device half is
    `Ready`."""

    page = 128

    def __init__(self, requests: int) -> None:
        from deepinfer.core.request import SamplingParams
        from deepinfer.engine import engine
        from deepinfer.engine.assembly import Parts, Sizes
        from deepinfer.kvcache.prefix import Reuse
        from deepinfer.replay.plan import ReplayRule

        pages = (requests + 1) * -(-LIMIT // self.page)
        parts = Parts(
            runner=None, tokenizer=None, vocab_size=VOCAB, eos_ids=(EOS,), overlap=True,
            sizes=Sizes(requests, pages, self.page, LIMIT, LONG, LONG, window_pages=2 * requests),
            rule=ReplayRule(layers=40, boundary=20, window=128, mode="compact", keep=140),
            reuse=Reuse(identity=b"made up", context=2),
        )  # fmt: skip
        self.device = Ready()
        self.llm = engine.LLM.from_parts(parts, device=self.device)
        self.call = engine._Call()
        self.params = SamplingParams

    @property
    def tokens(self) -> int:
        return self.device.tokens

    def made(self, number: int, prompt: list[int], tokens: int) -> object:
        return self.llm._read([prompt], self.params(max_tokens=tokens, ignore_eos=True, seed=1))

    def add(self, made: object) -> None:
        self.llm._submit(self.call, made)

    def plan(self) -> None:
        self.llm._step()

    def sampled(self, plan: None) -> None: ...
    def commit(self, plan: None, sampled: None) -> bool:
        return True


def _folder() -> str:
    """A model folder that says only what the peers' settings read of one."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": VOCAB, "eos_token_id": EOS,
        "max_position_embeddings": LIMIT, "torch_dtype": "bfloat16",
    }))  # fmt: skip
    return str(folder)


class NanoVllm:
    """`Scheduler` of nano-vllm. It never mixes prompts and decoding: where there are prompts, one
    of our steps is two or more of its passes, and a new request gets two tokens in it."""

    page, tokens = 256, 0  # the only size it takes

    def __init__(self, requests: int) -> None:
        # The package itself imports kernels that a machine without an accelerator cannot have.
        if "nanovllm" not in sys.modules:
            places = importlib.util.find_spec("nanovllm").submodule_search_locations
            sys.modules["nanovllm"] = bare = types.ModuleType("nanovllm")
            bare.__path__ = list(places)
        from nanovllm.config import Config
        from nanovllm.engine.scheduler import Scheduler
        from nanovllm.engine.sequence import Sequence
        from nanovllm.sampling_params import SamplingParams

        pages = (requests + 1) * -(-LIMIT // self.page)
        self.scheduler = Scheduler(
            Config(_folder(), max_num_batched_tokens=LONG, max_num_seqs=requests, eos=EOS,
                   max_model_len=LIMIT, num_kvcache_blocks=pages)
        )  # fmt: skip
        self.sequence, self.params = Sequence, SamplingParams

    def made(self, number: int, prompt: list[int], tokens: int) -> object:
        return self.sequence(prompt, self.params(max_tokens=tokens + 1, ignore_eos=True))

    def add(self, made: object) -> None:
        self.scheduler.add(made)

    def plan(self) -> tuple[list, bool]:
        return self.scheduler.schedule()

    def sampled(self, plan: tuple[list, bool]) -> list[int]:
        sequences, prompts = plan
        self.tokens += 0 if prompts else len(sequences)
        return [SAID] * len(sequences)

    def commit(self, plan: tuple[list, bool], sampled: list[int]) -> bool:
        sequences, prompts = plan
        self.scheduler.postprocess(sequences, sampled)
        return not prompts


class Vllm:
    """vLLM's v1 `Scheduler`, prefix caching on, as it is by default, pages as long as ours."""

    page, tokens = 128, 0

    def __init__(self, requests: int) -> None:
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        pages = (requests + 1) * -(-LIMIT // self.page)
        config = VllmConfig(
            model_config=ModelConfig(_folder(), skip_tokenizer_init=True, max_model_len=LIMIT),
            cache_config=CacheConfig(block_size=self.page, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_model_len=LIMIT, is_encoder_decoder=False, max_num_seqs=requests,
                max_num_batched_tokens=LONG, async_scheduling=False,
            ),
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = pages
        spec = FullAttentionSpec(self.page, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        self.scheduler = Scheduler(
            config,
            KVCacheConfig(pages, [], [KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(config),
            self.page,
        )
        digest = get_hash_fn_by_name("sha256")
        init_none_hash(digest)
        self.hasher = get_request_block_hasher(self.page, digest)
        self.request, self.params, self.output = Request, SamplingParams, ModelRunnerOutput

    def made(self, number: int, prompt: list[int], tokens: int) -> object:
        params = self.params(max_tokens=tokens, ignore_eos=True)
        return self.request(str(number), prompt, params, None, block_hasher=self.hasher)

    def add(self, made: object) -> None:
        self.scheduler.add_request(made)

    def plan(self) -> object:
        return self.scheduler.schedule()

    def sampled(self, plan: object) -> object:
        names = list(plan.num_scheduled_tokens)
        self.tokens += len(names)
        index = {name: at for at, name in enumerate(names)}
        return self.output(names, index, [[SAID] for _ in names])

    def commit(self, plan: object, sampled: object) -> bool:
        self.scheduler.update_from_output(plan, sampled)
        return True


SIDES: dict[str, Callable[[int], Side]] = {"ours": Ours, "nano-vllm": NanoVllm, "vllm": Vllm}


class Load:
    """`requests` decoding, each for `life` tokens (None: longer than anybody looks), its place then
    taken by another. Ends and pages are spread evenly over the steps."""

    def __init__(self, make: Callable[[int], Side], requests: int, life: int | None) -> None:
        self.side, self.requests, self.life = make(requests), requests, life
        self.number = self.step = 0
        self.ends: Counter[int] = Counter()
        self.new = [self._made(-(-(at + 1) * (life or 0) // requests)) for at in range(requests)]
        # All prompts, and steps until what is put off to the end of a page is due as often as ever.
        self.run(WARM, lambda: None, lambda: None)
        gc.collect()
        gc.freeze()  # as vLLM does it: what came before the load is looked at no more
        gc.enable()

    def _made(self, tokens: int) -> object:
        self.number += 1
        spread = self.number * self.side.page // self.requests % self.side.page
        name = [self.number % VOCAB, self.number // VOCAB]  # no prompt begins as another does
        if self.life is not None:
            self.ends[self.step + tokens] += 1
        tokens = tokens if self.life is not None else LIMIT - 2 * self.side.page
        return self.side.made(self.number, name + [SAID] * (PROMPT + spread), tokens)

    def run(self, steps: int, on: Callable[[], None], off: Callable[[], None]) -> dict[str, float]:
        """Between `on` and `off` is what counts. Tokens and new requests a step, and how often
        there was a between."""
        side, spans, new = self.side, 0, 0
        before = side.tokens
        for _ in range(steps):
            self.new += [self._made(self.life) for _ in range(self.ends.pop(self.step, 0))]
            arriving, self.new = self.new, []
            new += len(arriving)
            whole = False
            while not whole:
                on()
                for one in arriving:
                    side.add(one)
                arriving = []
                plan = side.plan()
                off()
                sampled = side.sampled(plan)
                on()
                whole = side.commit(plan, sampled)
                off()
                spans += 2
            self.step += 1
        made = side.tokens - before
        return {"tokens": made / steps, "new": new / steps, "spans": spans / steps}


MARKS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
void stop(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""


class Seconds:
    """A stop watch as `on` and `off`."""

    def __init__(self) -> None:
        self.sum = 0.0

    def on(self) -> None:
        self.started = time.perf_counter()

    def off(self) -> None:
        self.sum += time.perf_counter() - self.started


def main() -> None:
    side, library = sys.argv[1], sys.argv[2:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is not an answer
    load = None
    gc.disable()  # minutes less of imports under callgrind
    for line in sys.stdin:
        command, *rest = json.loads(line)
        answer: object = None
        if command == "make":
            load = Load(SIDES[side], *rest)
        elif command == "time":
            watch = Seconds()
            load.run(rest[0], watch.on, watch.off)
            answer = watch.sum / rest[0]
        elif command == "count":  # two dumps: n steps, 2 n steps; before them one of empty spans
            marks = ctypes.CDLL(library[0])
            marks.start()
            for _ in range(rest[0]):
                marks.toggle()
                marks.toggle()
            marks.stop()
            answer = []
            for steps in (rest[0], 2 * rest[0]):
                marks.start()
                answer.append(load.run(steps, marks.toggle, marks.toggle))
                marks.stop()
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
