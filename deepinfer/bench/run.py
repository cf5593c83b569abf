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
from deepinfer.bench.metrics import Heard, sample, summary
from deepinfer.bench.savings import savings
from deepinfer.bench.timed import Busy, Timed, watched
from deepinfer.bench.workload import ANSWER, Prompts, digest
from deepinfer.core.request import Completion, SamplingParams
from deepinfer.core.step import TokenDelta
from deepinfer.engine.assembly import Parts
from deepinfer.engine.engine import LLM
from deepinfer.errors import CapacityError, DeepinferError
from deepinfer.model import cost
from deepinfer.model.config import ModelConfig
from deepinfer.settings import Settings
from deepinfer.settings.values import Value
from deepinfer.speculative.acceptance import summary as traced
from deepinfer.speculative.proposal import Counts
from deepinfer.speculative.trace import Line, Trace, TraceStep

__all__ = ["Sweep", "TooSlow", "sized"]

SEED = 1
_ENGINES = 12  # most that take turns


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
        ready = []
        for jobs in wave:
            good = [job for job in jobs if not self._failed(job, job.problem)]
            if not good:
                continue
            try:
                engines.append(Engine(good, self))
            except DeepinferError as problem:
                for job in good:
                    self._failed(job, problem)
                continue
            for job in good:
                self.on_progress(self._done, self._count, "warming up")
                try:
                    one = Measuring(engines[-1], job, self)
                    one.warm_up()
                    ready.append(one)
                except DeepinferError as problem:
                    self._failed(job, problem)
        took = sum(one.took for one in ready) * self.method.repeats
        if self.method.patience is not None and took > self.method.patience:
            raise TooSlow
        return ready

    def _turns(self, ready: list[Measuring]) -> None:
        """One repeat of each row, then the next."""
        for repeat in range(self.method.repeats):
            for one in list(ready):
                held = self._held(one.job)
                try:
                    if repeat not in held:
                        self.on_progress(self._done, self._count, one.name)
                        found = one.repeat()
                        self.folder.add_sample(one.job.row_id, repeat, found)
                        self._done += 1
                        held = self._held(one.job)
                    if len(held) == self.method.repeats:
                        row = one.row([held[at] for at in sorted(held)])
                        self.folder.add_row(row)
                        self.on_row(row)
                        ready.remove(one)
                except DeepinferError as problem:
                    self._failed(one.job, problem)
                    ready.remove(one)

    def _held(self, job: Job) -> dict[int, dict[str, Any]]:
        held = self.folder.samples.get(job.row_id, {})
        return {at: one for at, one in held.items() if at < self.method.repeats}

    def _failed(self, job: Job, problem: DeepinferError | None) -> bool:
        """Keep a failure as a row, or raise it; False: there is none."""
        if problem is None:
            return False
        if not self.method.keep_going:
            raise problem
        row = {**_head(job, self.method), "status": "failed", "error": problem.as_json()}
        self._done += self.method.repeats - len(self._held(job))
        self.folder.add_row(row)
        self.on_row(row)
        return True


class Engine:
    """An engine just large enough for its rows. served: ops by back end."""

    def __init__(self, jobs: Sequence[Job], sweep: Sweep) -> None:
        lengths = [_lengths(job, sweep) for job in jobs]
        batch = max(job.axes["batch_size"] for job in jobs)
        longest = max(prompt + job.axes["gen_len"] for job, prompt in zip(jobs, lengths,
                                                                          strict=True))  # fmt: skip
        settings = sized(jobs[0].settings, batch, longest)
        parts = sweep.make(settings)
        if longest > parts.sizes.max_model_len:
            raise CapacityError(
                "prompt-too-long",
                f"prompt and answer have {longest:,} tokens, the model takes "
                f"{parts.sizes.max_model_len:,}",
                hint="--prompt-len or --gen-len shorter",
            )
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
        axes, config = job.axes, sweep.config
        count, length = axes["batch_size"], axes["prompt_len"]
        self._params = SamplingParams(
            max_tokens=axes["gen_len"], temperature=sweep.method.temperature, seed=SEED,
            ignore_eos=True,
        )  # fmt: skip
        self._cached = tokens_cached(axes["cached"], length or 0)
        self._sessions: Sequence[Any] = ()
        if sweep.texts is not None:
            self._prompts = sweep.prompts.given(sweep.texts, length, count)
        else:
            self._prompts = sweep.prompts.make(axes["workload"], length, count)
        if axes["workload"] == "agent":
            self._sessions = sweep.prompts.sessions(length, self._cached, count)
        self._longest = max(self._prompts, key=len)
        settings = engine.settings
        self._plan = engine.parts.rule.plan_with_hit(
            len(self._longest), self._cached, engine.parts.sizes.page_tokens,
            settings.encoder_replay,
        )  # fmt: skip
        tokens = len(self._longest) + axes["gen_len"] - 1
        rollback, drafts = settings.max_rollback, engine.parts.drafting is not None
        self._facts: dict[str, Any] = {
            "kv_bytes": count * cost.held_bytes(config, tokens, rollback, drafts),
            "cards": 1,
            "prompt_digest": digest(self._prompts),
        }
        self._positions: list[float] | None = None
        self._busy: Busy | None = None

    @property
    def name(self) -> str:
        axes = self.job.axes
        return " ".join(
            f"{word} {axes[name]}"
            for name, word in (("batch_size", "batch"), ("swa_keep", "keep"), ("mtp", "mtp"))
        )

    def warm_up(self) -> None:
        """Count a prefill, then run what will be timed, the first time watching every draft; once
        more to watch a device that works beside the host."""
        llm, method = self.engine.llm, self.sweep.method
        measured = llm.measure(self._longest, cached=self._plan.cached)
        self._facts |= savings(self.sweep.config, self._plan, measured)
        for at in range(method.warmup):
            start = self.sweep.clock()
            if at == 0 and self.engine.parts.drafting is not None:
                with llm.fresh():
                    results, steps = llm.trace(self._primed(), self._params)
                _raise_first(results)
                self._positions = _positions(steps)
            else:
                self.repeat()
            self.took = self.sweep.clock() - start
        if self.engine.device.beside:
            with llm.fresh():
                self._busy = watched(llm, self.engine.device, self._primed(), self._params)

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
        found = sample(heard, cards=self._facts["cards"])
        found |= device.spent().per_step(end - start, self._busy)
        return {**found, "answers": digest([result.token_ids for result in done])}

    def row(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The row of the samples of all repeats."""
        found = summary(samples)
        why = found.pop("why", {})
        positions, fraction = self._positions, self._fraction(found)
        if positions is None:
            drafting = self.engine.parts.drafting is not None
            why["acceptance_by_position"] = (
                "no warm-up watched the drafts" if drafting else "nothing is drafted"
            )
        if fraction is None:
            why["ceiling_fraction"] = (
                "unknown device: no ceiling" if self.sweep.floors is None else "nothing was timed"
            )
        answers = {one.get("answers") for one in samples}
        found["answers"] = sorted(map(str, answers))
        return {
            **_head(self.job, self.sweep.method), **self._facts, **found,
            "acceptance_by_position": positions, "ceiling_fraction": fraction,
            "same_answers": len(answers) == 1, **({"why": why} if why else {}),
        }  # fmt: skip

    def _primed(self) -> list[tuple[int, ...]]:
        """Let the engine know what is to be known, and give what is asked then."""
        llm = self.engine.llm
        if not self._sessions:
            if self._cached:
                known = [prompt[: self._cached] for prompt in self._prompts]
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

    def _fraction(self, found: Mapping[str, Any]) -> dict[str, float | None] | None:
        """Floors over the medians of prefill and of a decoding step."""
        floors, axes = self.sweep.floors, self.job.axes
        if floors is None or found["status"] != "ok":
            return None
        count = axes["batch_size"]
        ready = found["samples"]["ready_ms"]
        prefill = floors.prefill(self._plan, count) / (sorted(ready)[len(ready) // 2] / 1e3)
        decode = None
        if found["tpot_ms"]:
            accepted = found["accepted_length"]["median"] if found["accepted_length"] else 1.0
            step = found["tpot_ms"]["median"] / 1e3 * accepted
            context = len(self._longest) + axes["gen_len"] / 2
            rows = 1 + (found["verified_length"] or 0.0)
            decode = float(f"{floors.decode(context, count, rows) / step:.4g}")
        return {"prefill": float(f"{prefill:.4g}"), "decode": decode}


def _waves(jobs: Sequence[Job], together: int) -> Iterator[list[list[Job]]]:
    """Jobs by engine, so many engines at a time."""
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.engine, []).append(job)
    each = list(groups.values())
    step = max(min(together, _ENGINES), 1)
    for at in range(0, len(each), step):
        yield each[at : at + step]


def _lengths(job: Job, sweep: Sweep) -> int:
    """The longest prompt of a job."""
    if sweep.texts is None:
        return job.axes["prompt_len"]
    given = sweep.prompts.given(sweep.texts, job.axes["prompt_len"], job.axes["batch_size"])
    return max(map(len, given))


def sized(settings: Settings, batch: int, longest: int) -> Settings:
    """Memory for the largest rows and what they leave to resume from, unless somebody chose."""
    page = settings.page_tokens
    pages = (batch + 1) * (-(-longest // page) + 2)
    needed = {
        "max_num_seqs": batch, "max_model_len": longest + 1, "kv_cache_tokens": pages * page,
    }  # fmt: skip
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


def _positions(steps: Sequence[TraceStep]) -> list[float]:
    """Accepted / drafted at each draft position."""
    lines = tuple(Line(step, (), None) for step in steps)
    return [round(one["acceptance"], 4) for one in traced(Trace({}, lines))["by_position"]]


def _raise_first(results: Sequence[Completion]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error.raised()
