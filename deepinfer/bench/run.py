"""Running a sweep: engines, warm-up, interleaved repeats, rows as they end.

Jobs, prompts and a folder come in; rows go to the folder and to whoever listens. Engines that fit
into memory together take turns, one repeat of each row after the other, so that a machine that
changes changes for all of them. It must not know options, tables or pictures.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deepinfer.bench.axes import tokens_cached
from deepinfer.bench.ceilings import Floors
from deepinfer.bench.files import ROW, Folder
from deepinfer.bench.job import Job, Method
from deepinfer.bench.metrics import Heard, sample, spread, summary
from deepinfer.bench.savings import savings
from deepinfer.bench.timed import Busy, Timed, watched
from deepinfer.bench.workload import ANSWER, Prompts, Session, digest
from deepinfer.core.request import Completion, SamplingParams
from deepinfer.core.step import TokenDelta
from deepinfer.engine.assembly import Parts
from deepinfer.engine.engine import LLM
from deepinfer.errors import CapacityError, DeepinferError
from deepinfer.model import cost
from deepinfer.model.config import ModelConfig
from deepinfer.replay.meter import Measured, Meter
from deepinfer.settings import Settings
from deepinfer.settings.values import Value
from deepinfer.speculative.proposal import Counts

__all__ = ["Sweep", "TooSlow", "sized"]

SEED = 1
_ENGINES = 12  # most that take turns
_NOT_TIMED = "nothing was timed"
_SHARES = {part: f"ceiling_fraction.{part}" for part in ("prefill", "decode")}
_UNLIKE = "prompts of several lengths"


class TooSlow(Exception):
    """The repeats would take longer than `Method.patience`; nothing was measured yet."""


class Sweep:
    """A list of jobs in one folder.

    make: an engine's parts from its settings. prompts, texts: what is asked; texts are a user's
    own. floors: by what rows are judged, None where the device is unknown. on_row, on_progress
    (repeats done, of how many, what runs): listeners. Times are read from `clock`, in seconds.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        folder: Folder,
        method: Method,
        *,
        make: Callable[[Settings], Parts],
        config: ModelConfig,
        prompts: Prompts,
        texts: Sequence[str] | None = None,
        floors: Floors | None = None,
        on_row: Callable[[Mapping[str, Any]], object] = lambda row: None,
        on_progress: Callable[[int, int, str], object] = lambda done, count, what: None,
        warn: Callable[[str], object] = lambda line: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.jobs = [job for job in jobs if job.row_id not in folder.rows]
        self.folder, self.method, self.config, self.make = folder, method, config, make
        self.prompts, self.texts, self.floors = prompts, texts, floors
        self.on_row, self.on_progress, self.warn, self.clock = on_row, on_progress, warn, clock
        self._count = len(self.jobs) * method.repeats
        self._done = sum(len(self._held(job)) for job in self.jobs)
        self._patience = method.patience

    def run(self) -> None:
        """Measure every job that the folder has no row of. Raises the error of the first that
        fails, or makes it a row with `keep_going`; what is done stays done in any case."""
        for wave in _waves(self.jobs, self.method.together):
            engines: list[Engine] = []
            try:
                self._turns(self._ready(wave, engines))
            finally:
                for engine in engines:
                    engine.close()
                engines.clear()
                gc.collect()

    def _ready(self, wave: Sequence[Sequence[Job]], engines: list[Engine]) -> list[Measuring]:
        """Open the engines of a wave and warm every row up."""
        ready: list[Measuring] = []
        failed: list[tuple[Job, DeepinferError]] = []

        def lost(job: Job, problem: DeepinferError) -> None:
            if not self.method.keep_going:
                raise problem
            failed.append((job, problem))

        for jobs in wave:
            for job in jobs:
                if job.problem:
                    lost(job, job.problem)
            good = [job for job in jobs if not job.problem]
            while good:
                try:
                    engines.append(Engine(good, self))
                    break
                except CapacityError as problem:
                    largest = max(good, key=lambda job: job.axes["batch_size"] * _tokens(job, self))
                    lost(largest, problem)
                    good.remove(largest)
                except DeepinferError as problem:
                    for job in good:
                        lost(job, problem)
                    good = []
            for job in good:
                self.on_progress(self._done, self._count, "warming up")
                try:
                    one = Measuring(engines[-1], job, self)
                    one.warm_up()
                    ready.append(one)
                except DeepinferError as problem:
                    lost(job, problem)
        self._judge(ready)
        for job, why in failed:
            self._failed(job, why)
        return ready

    def _judge(self, ready: Sequence[Measuring]) -> None:
        """Raise TooSlow if all rows, those of later waves too, would take too long by the first
        wave's warm-ups. Nothing is kept before: rows of other lengths take their place."""
        patience = self._patience
        if ready and patience is not None:
            self._patience = None
            mean = sum(one.took for one in ready) / len(ready)
            if mean * len(self.jobs) * self.method.repeats > patience:
                raise TooSlow

    def _turns(self, ready: list[Measuring]) -> None:
        """One repeat of each row, then the next."""
        for repeat in range(self.method.repeats):
            for one in list(ready):
                if repeat not in self._held(one.job):
                    self.on_progress(self._done, self._count, one.name)
                    try:
                        found = one.repeat()
                    except DeepinferError as problem:
                        self._failed(one.job, problem)
                        ready.remove(one)
                        continue
                    self.folder.add_sample(one.job.row_id, repeat, found)
                    self._done += 1
                held = self._held(one.job)
                if len(held) == self.method.repeats:
                    ready.remove(one)
                    self._keep(one.row([held[at] for at in sorted(held)]))

    def _held(self, job: Job) -> dict[int, dict[str, Any]]:
        held = self.folder.samples.get(job.row_id, {})
        return {at: one for at, one in held.items() if at < self.method.repeats}

    def _failed(self, job: Job, problem: DeepinferError) -> None:
        """Keep a failure as a row, or raise it."""
        if not self.method.keep_going:
            raise problem
        self._done += self.method.repeats - len(self._held(job))
        self._keep(
            {**_head(job, self.method), "status": "failed", "error": problem.as_json()}
        )  # fmt: skip

    def _keep(self, row: Mapping[str, Any]) -> None:
        self.folder.add_row(row)
        self.on_row(row)


class Engine:
    """An engine just large enough for its rows. served: ops by back end."""

    def __init__(self, jobs: Sequence[Job], sweep: Sweep) -> None:
        most = sweep.config.max_position_embeddings - 1  # what is longer fails by itself
        sizes = [(job.axes["batch_size"], min(_tokens(job, sweep), most)) for job in jobs]
        settings = sized(jobs[0].settings, sizes)
        parts = sweep.make(settings)
        self.settings, self.parts = settings, parts
        self.device = Timed(parts, sweep.clock)
        self.llm = LLM.from_parts(
            parts, on_warning=sweep.warn, clock=sweep.clock, device=self.device
        )
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        self.llm.close()
        gc.unfreeze()


class Measuring:
    """One row on its engine. took: seconds of its last warm-up."""

    def __init__(self, engine: Engine, job: Job, sweep: Sweep) -> None:
        self.engine, self.job, self.sweep, self.took = engine, job, sweep, 0.0
        axes, config, tokens = job.axes, sweep.config, _tokens(job, sweep)
        most = engine.parts.sizes.max_model_len
        if tokens > most:
            raise CapacityError(
                "prompt-too-long",
                f"prompt and answer have {tokens:,} tokens, the model takes {most:,}",
                hint="--prompt-len or --gen-len shorter",
            )
        count, length = axes["batch_size"], axes["prompt_len"]
        self._params = SamplingParams(
            max_tokens=axes["gen_len"], temperature=sweep.method.temperature, seed=SEED,
            ignore_eos=True,
        )  # fmt: skip
        self._sessions: Sequence[Session] = ()
        if sweep.texts is not None:
            self._prompts = sweep.prompts.given(sweep.texts, length, count)
        else:
            self._prompts = sweep.prompts.make(axes["workload"], length, count)
        self._longest = max(self._prompts, key=len)
        cached = tokens_cached(axes["cached"], len(self._longest))
        asked = digest(self._prompts)
        if axes["workload"] == "agent":
            self._sessions = sweep.prompts.sessions(length, cached, count)
            asked = digest([ids for one in self._sessions for ids in (*one.said, one.last)])
            # The last token of an answer has not run when its session goes on.
            cached -= bool(self._sessions[0].said)
        settings = engine.settings
        self._plan = engine.parts.rule.plan_with_hit(
            len(self._longest), cached, engine.parts.sizes.page_tokens, settings.encoder_replay,
        )  # fmt: skip
        rollback, drafts = settings.max_rollback, engine.parts.drafting is not None
        self._facts: dict[str, Any] = {
            "kv_bytes": count * cost.held_bytes(config, tokens - 1, rollback, drafts),
            "cards": 1,
            "prompt_digest": asked,
        }
        self._busy: Busy | None = None

    @property
    def name(self) -> str:
        axes = self.job.axes
        return " ".join(
            f"{word} {axes[name]}"
            for name, word in (("batch_size", "batch"), ("swa_keep", "keep"), ("mtp", "mtp"))
        )

    def warm_up(self) -> None:
        """Count a prefill, then run what will be timed; once more to watch a device that works
        beside the host."""
        self._facts |= savings(self.sweep.config, self._plan, self._counted())
        for _ in range(self.sweep.method.warmup):
            start = self.sweep.clock()
            self.repeat()
            self.took = self.sweep.clock() - start
        if self.engine.device.beside:
            with self.engine.llm.fresh():
                self._busy = watched(
                    self.engine.llm, self.engine.device, self._primed(), self._params
                )

    def _counted(self) -> Measured:
        """What the longest prompt really computes; behind its history, if it is of a session."""
        llm = self.engine.llm
        if not self._sessions:
            return llm.measure(self._longest, cached=self._plan.cached)
        with llm.fresh():
            prompt = self._primed()[0]
            with Meter(llm.parts.runner) as meter:
                _raise_first(llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0)))
                return meter.measured(len(prompt))

    def repeat(self) -> dict[str, Any]:
        """Run the row once: a sample, and a digest of the answers under `answers`."""
        llm, clock, device = self.engine.llm, self.sweep.clock, self.engine.device
        with llm.fresh():
            prompts = self._primed()
            gc.collect()
            device.spent()
            stream = llm.stream(prompts, self._params)
            start = clock()
            heard = [Heard(start, len(prompt)) for prompt in prompts]
            results: list[Completion | None] = [None] * len(prompts)
            for delta in stream:
                _hear(delta, heard[delta.index], clock())
                results[delta.index] = delta.result
            end = clock()
        done = [result for result in results if result is not None]
        _raise_first(done)
        for one, result in zip(heard, done, strict=True):
            _account(one, result)
        found = sample(heard, cards=self._facts["cards"], drafts=self.job.axes["mtp"])
        found |= device.spent().per_step(end - start, self._busy)
        said = [result.token_ids for result in done]
        return {**found, "answers": digest([*prompts, *said] if self._sessions else said)}

    def row(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The row of the samples of all repeats."""
        found = summary(samples)
        why = found.pop("why", {})
        shares = self._shares([one for one in samples if one.get("completed")])
        fraction = {
            part: spread(values) if (values := [v for v in shares[name] if v]) else None
            for part, name in _SHARES.items()
        } if shares else None  # fmt: skip
        if fraction is None:
            unknown = self.sweep.floors is None
            why["ceiling_fraction"] = "unknown device: no ceiling" if unknown else _NOT_TIMED
        else:
            reasons = {"prefill": _UNLIKE, "decode": why.get("decode_tok_s", _NOT_TIMED)}
            why |= {_SHARES[part]: reasons[part] for part, v in fraction.items() if v is None}
        answers = {one.get("answers") for one in samples}
        found["answers"] = sorted(map(str, answers))
        found["samples"] |= shares
        return {
            **_head(self.job, self.sweep.method), **self._facts, **found,
            "ceiling_fraction": fraction, "same_answers": len(answers) == 1,
            **({"why": why} if why else {}),
        }  # fmt: skip

    def _primed(self) -> list[tuple[int, ...]]:
        """Let the engine know what is to be known, and give what is asked then."""
        llm = self.engine.llm
        if not self._sessions:
            cached = self.job.axes["cached"]
            known = [prompt[: tokens_cached(cached, len(prompt))] for prompt in self._prompts]
            known = [ids for ids in known if ids]
            if known:
                _raise_first(llm.generate(known, SamplingParams(max_tokens=1, temperature=0)))
            return self._prompts
        short = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
        history: list[tuple[int, ...]] = [() for _ in self._sessions]
        for turn in range(len(self._sessions[0].said)):
            asked = [
                (*before, *session.said[turn])
                for before, session in zip(history, self._sessions, strict=True)
            ]
            results = llm.generate(asked, short)
            _raise_first(results)
            history = [
                (*ids, *result.token_ids) for ids, result in zip(asked, results, strict=True)
            ]
        return [
            (*before, *session.last)
            for before, session in zip(history, self._sessions, strict=True)
        ]

    def _shares(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
        """Of each repeat: the floor over the time until every request had its first token, and over
        a decoding step of the window in which all decode. Empty where there is no ceiling."""
        floors, count = self.sweep.floors, self.job.axes["batch_size"]
        if floors is None or not samples:
            return {}
        lengths = [len(prompt) for prompt in self._prompts]
        prefill = floors.prefill(self._plan, count) * 1e3 if len(set(lengths)) == 1 else None
        steps = []
        for one in samples:
            told = one.get("speculation") or {"verified": 0, "steps": 1}
            rows = 1 + told["verified"] / max(told["steps"], 1)
            context = sum(lengths) / count + (one["decode_behind"] or 0)
            least = floors.decode(context, count, rows) * 1e3
            steps.append(least / one["decode_step_ms"] if one["decode_step_ms"] else None)
        first = [prefill and prefill / one["ready_ms"] for one in samples]
        return dict(zip(_SHARES.values(), (first, steps), strict=True))


def _waves(jobs: Sequence[Job], together: int) -> Iterator[list[list[Job]]]:
    """Jobs by engine, so many engines at a time."""
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.engine, []).append(job)
    each = list(groups.values())
    step = max(min(together, _ENGINES), 1)
    for at in range(0, len(each), step):
        yield each[at : at + step]


def _tokens(job: Job, sweep: Sweep) -> int:
    """Of a job's longest prompt with its answer."""
    length, count = job.axes["prompt_len"], job.axes["batch_size"]
    if sweep.texts is not None:
        length = max(map(len, sweep.prompts.given(sweep.texts, length, count)))
    return length + job.axes["gen_len"]


def sized(settings: Settings, sizes: Sequence[tuple[int, int]]) -> Settings:
    """Memory for each of the rows, requests and tokens of one, with what it leaves to resume from,
    unless somebody chose."""
    page = settings.page_tokens
    pages = max((batch + 1) * (-(-tokens // page) + 2) for batch, tokens in sizes)
    needed = {
        "max_num_seqs": max(batch for batch, _ in sizes),
        "max_model_len": max(tokens for _, tokens in sizes) + 1,
        "kv_cache_tokens": pages * page,
    }
    return settings.changed(
        {
            name: Value(value, "default", "the rows of this sweep")
            for name, value in needed.items()
            if not settings.values[name].chosen
        }
    )


def _head(job: Job, method: Method) -> dict[str, Any]:
    return {
        "schema": ROW, "row_id": job.row_id, "kind": "e2e", "axes": dict(job.axes),
        "repeats": method.repeats, "warmup": method.warmup,
    }  # fmt: skip


def _hear(delta: TokenDelta, heard: Heard, now: float) -> None:
    if delta.token_ids:
        heard.deliveries.append((now, len(delta.token_ids)))


def _account(heard: Heard, result: Completion) -> None:
    """What the engine counted of a request."""
    usage, told = result.usage, result.speculation
    heard.cached, heard.replayed = usage.cached_tokens, usage.replayed_tokens
    heard.computed = usage.computed_tokens
    if result.timing_ms.queue is not None:
        heard.queue = result.timing_ms.queue / 1e3
    if told is not None:
        steps, drafted, verified, accepted = (
            int(str(told[name])) for name in ("steps", "drafted", "verified", "accepted")
        )
        # The first token came with the prompt; all others were committed by steps.
        committed = usage.completion_tokens - 1
        heard.counts = Counts(steps, drafted, verified, accepted, 0, committed)


def _raise_first(results: Sequence[Completion]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error.raised()
