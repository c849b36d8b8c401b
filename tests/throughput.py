"""Decode throughput of the built-in model: no speculation, fixed DSpark-7 and adaptive DSpark-7, in one run.

    python -m tests.throughput PROMPTS.jsonl [PROMPTS.jsonl ...] [--concurrency 1 4 16] [--tokens 96] [--rounds 3]

Arms alternate (A B C A B C) and each cell reports the median and the spread over rounds; decode tokens per second
leave prefill out: tokens after the first, over the time after the last prompt was computed. Then the acceptance length
per prompt file. Nothing else may run on the machine meanwhile. JSON lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from core.config import CalibrationConfig, ContextConfig
from core.devices.base import Device, open_device
from core.engine.build import Engine
from core.engine.service import build_engine
from core.types import Request
from metrics.stats import StepStats
from tests.engines import engine_config, greedy
from tests.parity import encode_prompts, read_prompts

WIDTH, MAX_MODEL_LEN = 7, 1024


def preset(buckets: tuple[int, ...]) -> CalibrationConfig:
    """The built-in model's calibration preset, for these buckets."""
    return CalibrationConfig(
        source="preset",
        model="additive",
        request_buckets=buckets,
        target_graph_rows={b: (b, 2 * b, 4 * b, b * (WIDTH + 1)) for b in buckets},
        contexts=(ContextConfig(prefill_tokens=128, min_kv_length=1, max_kv_length=MAX_MODEL_LEN),),
        warmup_steps=2,
        window_steps=8,
        windows_per_point=2,
        token_seed=1,
    )


def make_engine(arm: str, buckets: tuple[int, ...], threads: int, device: Device | None = None) -> Engine:
    """An engine of one arm: none, fixed or adaptive."""
    config = engine_config(
        None,
        width=0 if arm == "none" else WIDTH,
        adaptive=arm == "adaptive",
        max_seqs=buckets[-1],
        buckets=buckets,
        page_size=16,
        max_model_len=MAX_MODEL_LEN,
        chunk=512,
        dtype="bfloat16",
        calibration=preset(buckets) if arm == "adaptive" else None,
    )
    return build_engine(
        dataclasses.replace(config, device=dataclasses.replace(config.device, num_threads=threads)),
        device=device,
    )


def decode(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[StepStats]]:
    """Run prompts together; (decode tokens per second, statistics of the steps)."""
    for index, ids in enumerate(prompts, 1):
        engine.add(Request(request_id=index, prompt_token_ids=tuple(ids), params=greedy(tokens)))
    engine.loop.scheduler.prefill_first = True  # so that decode starts with every sequence in the batch
    steps: list[StepStats] = []
    started, before = 0.0, 0
    while engine.has_work:
        outcome = engine.advance()
        if outcome is None:
            continue
        steps.append(outcome.stats)
        if outcome.stats.transient:
            started, before = time.perf_counter(), sum(s.emitted for s in steps)
    seconds = time.perf_counter() - started
    return (sum(s.emitted for s in steps) - before) / seconds, steps


def acceptance_length(steps: Sequence[StepStats]) -> float:
    """Mean tokens a sequence gets per speculative step, bonus included."""
    drafted = sum(s.speculative_sequence_steps for s in steps)
    return 1 + sum(s.accepted for s in steps) / max(drafted, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--acceptance-prompts", type=int, default=20)
    args = parser.parse_args()
    buckets = tuple(1 << i for i in range(max(args.concurrency).bit_length()))
    # One stream for all: a team of OpenMP threads for each engine would slow every one of them down.
    device = open_device("cpu", num_threads=args.threads, graph_backend="cpugraph")
    engines = {arm: make_engine(arm, buckets, args.threads, device) for arm in ("none", "fixed", "adaptive")}
    prompts = encode_prompts(engines["none"], read_prompts(args.prompts, 64), args.tokens)
    for concurrency in args.concurrency:
        rates: dict[str, list[float]] = {arm: [] for arm in engines}
        budgets: list[float] = []
        hosts: dict[str, list[float]] = {arm: [] for arm in engines}
        for round_ in range(args.rounds + 1):
            batch = [prompts[(i + concurrency * round_) % len(prompts)] for i in range(concurrency)]
            for arm, engine in engines.items():
                rate, steps = decode(engine, batch, args.tokens)
                if round_:  # the first round warms up
                    rates[arm].append(rate)
                    hosts[arm] += [s.schedule_seconds for s in steps]
                    budgets += [s.target_rows for s in steps if s.decided and arm == "adaptive"]
        for arm in engines:
            print(
                json.dumps(
                    {
                        "arm": arm,
                        "concurrency": concurrency,
                        "decode_tokens_per_second": round(statistics.median(rates[arm]), 1),
                        "spread": [round(min(rates[arm]), 1), round(max(rates[arm]), 1)],
                        "ratio_to_none": round(
                            statistics.median(a / b for a, b in zip(rates[arm], rates["none"], strict=True)),
                            3,
                        ),
                        "host_ms_per_step": round(1e3 * statistics.median(hosts[arm]), 3),
                        "mean_budget": round(statistics.mean(budgets), 1) if arm == "adaptive" else None,
                    }
                ),
                flush=True,
            )
    for file in args.prompts if args.acceptance_prompts else []:
        ids = encode_prompts(engines["fixed"], read_prompts([file], args.acceptance_prompts), args.tokens)
        steps = [
            s for i in range(0, len(ids), 4) for s in decode(engines["fixed"], ids[i : i + 4], args.tokens)[1]
        ]
        print(
            json.dumps(
                {
                    "prompts": file.stem,
                    "count": len(ids),
                    "acceptance_length": round(acceptance_length(steps), 3),
                }
            ),
            flush=True,
        )
    device.close()


if __name__ == "__main__":
    main()
