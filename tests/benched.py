"""Rows of `bench` as its files hold them, made up for tests of what is drawn and said of them.

No number here was measured: speeds follow a formula, with a little noise from a seed.
"""

import hashlib
import json
import random


def stats(samples):
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "median": ordered[len(ordered) // 2], "p5": ordered[round(0.05 * last)],
        "p95": ordered[round(0.95 * last)], "n": len(ordered),
    }  # fmt: skip


def row(seed=0, speed=1.0, synthetic=None, noise=0.03, **given):
    """A run of made-up speed; `given`: axes."""
    axes = {
        "prompt_len": 1024, "gen_len": 64, "batch_size": 1, "cached": 0, "swa_keep": 140,
        "replay_mode": "compact", "mtp": 5, "mtp_varlen": False, "verify": "coupled",
        "batch_invariant": True, "overlap": False, "backend": "cpu", "dtype": "bf16",
        "accelerator": "cpu", "workload": "code", "model": "embedded", "synthetic": synthetic,
        **given,
    }  # fmt: skip
    text = json.dumps(axes, sort_keys=True)
    draw = random.Random(f"{seed}/{text}")
    batch, length = axes["batch_size"], axes["prompt_len"]
    cut = axes["swa_keep"] == "full"
    accepted = 1 + 0.5 * axes["mtp"] ** 0.5
    step_ms = 20 * (1 + 0.08 * batch) * (1 + 0.04 * axes["mtp"]) * (1 + length / 65536) / speed
    first_ms = batch * length * (0.08 if cut else 0.045) / speed
    many = [draw.gauss(1, noise) for _ in range(5)]
    tpot = [step_ms / accepted * x for x in many]
    ttft = [first_ms * x for x in many]
    rate = [batch * 64 / (first + 63 * each) * 1e3 for first, each in zip(ttft, tpot, strict=True)]
    saved = 0.0 if cut else 0.43
    return {
        "schema": "deepinfer.bench.row/1",
        "row_id": hashlib.sha256(text.encode()).hexdigest()[:16],
        "kind": "e2e", "axes": axes, "repeats": 5, "warmup": 1,
        "prefill_saved_rows": {"planned": saved, "measured": saved},
        "prefill_saved_flops": {"planned": saved, "measured": saved},
        "ttft_ms": stats(ttft), "tpot_ms": stats(tpot), "output_tok_s": stats(rate),
        "output_tok_s_per_card": stats(rate), "total_tok_s": stats([17 * r for r in rate]),
        "prompt_tok_s": stats([1e3 * batch * length / t for t in ttft]),
        "queue_ms": stats([0.1] * 5), "host_ms_per_step": stats([0.4] * 5),
        "host_work_ms_per_step": stats([0.5] * 5),
        "accepted_length": stats([accepted] * 5) if axes["mtp"] else None,
        "acceptance_rate": 0.41 if axes["mtp"] else None,
        "acceptance_by_position": [stats([0.8 * 0.7**at] * 5) for at in range(axes["mtp"])] or None,
        "accepted_length_uncut": stats([accepted] * 5) if axes["mtp"] else None,
        "decode_tok_s": stats([1e3 * batch / each for each in tpot]),
        "decode_step_ms": stats([step_ms * x for x in many]), "prefill_in_tpot": False,
        "verified_length": stats([float(axes["mtp"])] * 5),
        "prompt_tokens": {"cached": 0, "computed": length, "replayed": 0},
        "kv_bytes": 890 * length * batch, "cards": 1,
        "ceiling_fraction": {
            "prefill": stats([0.35] * 5), "decode": stats([0.2 + 0.1 / batch] * 5),
        },
        "samples": {
            "ttft_ms": ttft, "tpot_ms": tpot, "output_tok_s": rate,
            "decode_tok_s": [1e3 * batch / each for each in tpot],
        },
        "self_ratio": 1.003, "steady": True, "outliers": 0, "status": "ok",
    }  # fmt: skip


def op(name, backend, rows, flops, bytes_, microseconds):
    times = [microseconds * x for x in (0.97, 0.99, 1.0, 1.01, 1.06)]
    axes = {"op": name, "backend": backend, "rows": rows, "dtype": "bf16"}
    return {
        "schema": "deepinfer.bench.row/1", "kind": "ops", "axes": axes, "status": "ok",
        "row_id": hashlib.sha256(json.dumps(axes).encode()).hexdigest()[:16],
        "time_us": stats(times), "bytes": bytes_, "flops": flops,
        "gb_per_s": stats([bytes_ / t / 1e3 for t in times]),
        "flop_per_s": stats([flops / t * 1e6 for t in times]),
        "ceiling_fraction": 0.5, "samples": {"time_us": times}, "steady": True,
    }  # fmt: skip


def sweep(**more):
    """keep x mtp x batch."""
    return [
        row(swa_keep=keep, mtp=mtp, batch_size=batch, **more)
        for keep in (140, 256, "full") for mtp in (0, 1, 3, 5) for batch in (1, 8)
    ]  # fmt: skip


def ops():
    found = []
    for backend, fast in (("cpu", 6.0), ("torch", 1.0)):
        for name, wide in (("linear", 256), ("experts", 1024), ("attention", 64)):
            for rows in (1, 8, 64, 512):
                flops, bytes_ = 2 * rows * wide * wide, wide * wide + 4 * rows * wide
                took = max(bytes_ / 6e3, flops / 1e4) / fast + 4
                found.append(op(name, backend, rows, flops, bytes_, took))
    return found


def meta(moved=0.01):
    before = {"copy_gb_per_s": 38.0, "bf16_gflop_per_s": 210.0, "fp32_gflop_per_s": 95.0}
    return {
        "schema": "deepinfer.bench/1", "deepinfer_version": "0.1.0",
        "created": "2026-11-30T09:00:00+00:00", "command": ["deepinfer", "bench", "--mtp", "0,5"],
        "settings": {
            "DEEPINFER_USE_NEXTN_DECODE": {"value": 5, "source": "flag", "origin": "--mtp"},
            "DEEPINFER_LOG": {"value": "warning", "source": "default", "origin": "the default"},
        },
        "environment": {
            "devices": [], "cpu": {"name": "A processor", "cores": 2}, "torch": "2.13.0",
            "commit": "0123456789abcdef", "dirty": False,
        },
        "ceilings": {
            "before": before, "after": {k: v * (1 + moved) for k, v in before.items()},
            "moved": moved > 0.03,
        },
    }  # fmt: skip


def save(folder, rows, **changed):
    """The folder of a run."""
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps({**meta(), **changed}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
