"""Greedy parity on the built-in model: adaptive verification and random budgets against no speculation.

    python -m tests.parity PROMPTS.jsonl [PROMPTS.jsonl ...] [--count 40] [--tokens 64] [--dtype float32]

Compares token for token at several concurrencies. A first difference is allowed only where the top-2 logit gap of
the plain run is below `--gap`: there two orders of summation may disagree about the larger one. Prints one JSON line
per arm; exits 1 when a difference has a larger gap.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.config import CalibrationConfig, ContextConfig
from core.devices.base import Device, open_device
from core.engine.batch import ChunkRows, RaggedBatch
from core.engine.build import Engine
from core.engine.service import build_engine
from core.kvcache.storage import KVStorage
from core.server.text import TextProcessor
from core.spec.budgets import ForcedRows
from tests.engines import engine_config, greedy, random_tier, run

MAX_MODEL_LEN = 1024
BUCKETS = (1, 2, 4, 8)
WIDTH = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where one prompt's outputs part, and how close the plain run's two best logits are there."""

    prompt: int
    position: int
    gap: float


def calibration(model: str = "additive") -> CalibrationConfig:
    """A quick calibration: parity does not depend on the costs, only the budgets do."""
    return CalibrationConfig(
        source="file",
        model=model,
        request_buckets=BUCKETS,
        target_graph_rows={b: (b, 2 * b, 4 * b, b * (WIDTH + 1)) for b in BUCKETS},
        contexts=(ContextConfig(prefill_tokens=32, min_kv_length=1, max_kv_length=MAX_MODEL_LEN),),
        warmup_steps=1,
        window_steps=2,
        windows_per_point=1,
        token_seed=1,
    )


def make_engine(*, adaptive: bool, dtype: str, device: Device) -> Engine:
    """The built-in model, without speculation or with adaptive DSpark-7."""
    config = engine_config(
        None,
        width=WIDTH if adaptive else 0,
        adaptive=adaptive,
        max_seqs=BUCKETS[-1],
        buckets=BUCKETS,
        page_size=16,
        max_model_len=MAX_MODEL_LEN,
        chunk=256,
        dtype=dtype,
        calibration=calibration() if adaptive else None,
    )
    return build_engine(config, device=device)


def read_prompts(files: Sequence[Path], count: int) -> list[str]:
    """The first prompts of every file in turn, `count` in all."""
    sets = [[json.loads(line)["prompt"] for line in file.open(encoding="utf-8")] for file in files]
    mixed = [prompt for group in zip(*sets, strict=False) for prompt in group]
    return mixed[:count]


def encode_prompts(engine: Engine, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Chat-templated ids that leave room for the answer."""
    text = TextProcessor(engine.target_path)
    encoded = [text.encode(text.render_chat([{"role": "user", "content": p}])) for p in prompts]
    return [list(ids) for ids in encoded if len(ids) + max_tokens < MAX_MODEL_LEN]


def top_gap(engine: Engine, ids: Sequence[int]) -> float:
    """Gap between the two best logits behind `ids`, from one whole forward pass."""
    model = engine.loop.worker.model
    pages = -(-len(ids) // 16) + 1
    storage = KVStorage(
        model.kv_layers,
        num_pages=pages,
        page_size=16,
        dtype=engine.loop.worker.storage.layers[0].key.dtype,
        device=torch.device("cpu"),
    )
    positions = torch.arange(len(ids))
    batch = RaggedBatch(
        input_ids=torch.tensor(ids),
        positions=positions,
        slot_mapping=positions + 16,
        decode=None,
        chunks=(ChunkRows(first_row=0, num_rows=len(ids), start=0, pages=torch.arange(1, pages)),),
    )
    with torch.inference_mode():
        hidden = model.forward(batch, storage.layers).hidden[-1:]
        best = model.logits(hidden).float().topk(2).values[0]
    return float(best[0] - best[1])


def differences(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
) -> list[Difference]:
    """First difference of each prompt whose outputs are not equal."""
    found = []
    for index, (prompt, want, have) in enumerate(zip(prompts, plain, got, strict=True)):
        if list(want) == list(have):
            continue
        position = next(
            (i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have))
        )
        found.append(
            Difference(prompt=index, position=position, gap=top_gap(engine, [*prompt, *want[:position]]))
        )
    return found


def compare(
    prompts: Sequence[str], *, tokens: int, dtype: str, concurrencies: Sequence[int], threads: int
) -> Iterator[tuple[str, int, list[Difference]]]:
    """Every arm's differences as it ends: (arm, concurrency, differences)."""
    device = open_device("cpu", num_threads=threads, graph_backend="cpugraph")  # one stream for both engines
    plain_engine = make_engine(adaptive=False, dtype=dtype, device=device)
    ids = encode_prompts(plain_engine, prompts, tokens)
    plain = [r.tokens for r in run(plain_engine, ids, greedy(tokens), concurrency=BUCKETS[-1])]
    engine = make_engine(adaptive=True, dtype=dtype, device=device)
    adaptive = engine.loop.speculator.budget
    tiers = engine.config.target_tiers
    for concurrency in concurrencies:
        for arm in ("adaptive", "random budgets"):
            forced = ForcedRows(tiers, draft_width=WIDTH, pick=random_tier(tiers, seed=concurrency))
            engine.loop.speculator.budget = adaptive if arm == "adaptive" else forced
            got = [r.tokens for r in run(engine, ids, greedy(tokens), concurrency=concurrency)]
            yield arm, concurrency, differences(plain_engine, ids, plain, got)
    device.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--gap",
        type=float,
        default=None,
        help="default: 1e-4 in float32, 0.3 in bfloat16: two spacings at logits of 16 to 32",
    )
    args = parser.parse_args()
    bound = args.gap if args.gap is not None else {"float32": 1e-4}.get(args.dtype, 0.3)
    prompts = read_prompts(args.prompts, args.count)
    worst = 0.0
    for arm, concurrency, found in compare(
        prompts, tokens=args.tokens, dtype=args.dtype, concurrencies=args.concurrency, threads=args.threads
    ):
        worst = max([worst, *(d.gap for d in found)])
        print(
            json.dumps(
                {
                    "arm": arm,
                    "concurrency": concurrency,
                    "dtype": args.dtype,
                    "prompts": len(prompts),
                    "different": len(found),
                    "gaps": [round(d.gap, 6) for d in found],
                }
            ),
            flush=True,
        )
    return 0 if worst < bound else 1


if __name__ == "__main__":
    sys.exit(main())
