"""The support matrix: every rule has a case here, and every message names flag, value and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.errors import DeviceUnavailable, ExitCode
from core.facts import BUILTIN_CONFIG, Checkpoint, Document
from core.options import flags_by_name
from core.rules import RULES
from tests.launch_facts import MODEL, MTP_STEP, MTP_VERIFY, VERIFY, draft, problems, resolved

WORDS: dict[str, dict[str, Any]] = {
    "DSPARK": {"speculative_algorithm": "DSpark"},
    "VERIFY": VERIFY,
    "MTP_VERIFY": MTP_VERIFY,
    "MTP_STEP": MTP_STEP,
    "TWO_RANKS": {"nproc_per_node": 2},
}

# options | what the message names (if left out: the last option) | a piece of the remedy
VIOLATIONS = """
[retired_names]
retired=enable_adaptive_spec_prune | use enable_adaptive_target_verify
retired=enable_adaptive_speculative_decode | use enable_adaptive_target_verify
[known_values]
backend=vlm | use one of: llm
model_impl=cpp | use one of: python
npu_kernel_backend=ATB | use one of: TORCH
device=tpu | use one of: auto, npu, cuda, cpu
dtype=float16 | use one of: auto, bfloat16, float32
python_graph_backend=cpugrahp | did you mean cpugraph?
speculative_algorithm=dspark | did you mean DSpark?
speculative_algorithm=EAGLE | use one of: none, DSpark, MTP
max_seqs_per_batch=0 | use at least 1
page_size=-16 | use 1..1024
num_threads=100000 | use 1..1024
port=70000 | use 0..65535
drain_timeout=nan | use at least 0
kv_cache_gb=0.0 | use a positive size
DSPARK num_speculative_tokens=0 | use at least 1
[one_switch]
MTP_VERIFY enable_adaptive_draft_step=true | enable_adaptive_target_verify=true | enable one of them
[switch_fits_algorithm]
DSPARK enable_adaptive_draft_step=true | set speculative_algorithm=MTP
enable_adaptive_draft_step=true | speculative_algorithm=none | set speculative_algorithm=MTP
enable_adaptive_target_verify=true | speculative_algorithm=none | set speculative_algorithm=DSpark or MTP
[adaptive_needs]
VERIFY enable_graph=false | set enable_graph=true
VERIFY disable_graph_warmup=true | set disable_graph_warmup=false
VERIFY enable_schedule_overlap=false | set enable_schedule_overlap=true
VERIFY enable_task_pipeline=false | set enable_task_pipeline=true
MTP_VERIFY enable_graph=false | set enable_graph=true
MTP_VERIFY disable_graph_warmup=true | set disable_graph_warmup=false
MTP_VERIFY enable_schedule_overlap=false | set enable_schedule_overlap=true
MTP_VERIFY enable_task_pipeline=false | set enable_task_pipeline=true
MTP_STEP enable_graph=false | set enable_graph=true
MTP_STEP disable_graph_warmup=true | set disable_graph_warmup=false
MTP_STEP enable_schedule_overlap=false | set enable_schedule_overlap=true
MTP_STEP enable_task_pipeline=false | set enable_task_pipeline=true
[adaptive_parallelism]
VERIFY TWO_RANKS cp_size=2 | set cp_size=1
MTP_VERIFY TWO_RANKS dp_size=2 | set dp_size=1
MTP_VERIFY TWO_RANKS cp_size=2 | set cp_size=1
MTP_STEP TWO_RANKS dp_size=2 | set dp_size=1
MTP_STEP TWO_RANKS cp_size=2 | set cp_size=1
[unified_graphs]
enable_unified_mtp_graph=true | set enable_unified_mtp_graph=false
MTP_STEP enable_unified_mtp_graph=true | enable_adaptive_draft_step=true | set enable_unified_mtp_graph=false
MTP_VERIFY enable_unified_mtp_graph=true | speculative_algorithm=MTP | set enable_unified_mtp_graph=false
VERIFY TWO_RANKS enable_unified_mtp_graph=true dp_size=2 | or dp_size=1
DSPARK TWO_RANKS enable_unified_mtp_graph=true dp_size=2 | or dp_size=1
[pd_disaggregation]
MTP_STEP enable_pd_disaggregation=true | set enable_pd_disaggregation=false
[greedy_draft]
VERIFY enable_probabilistic_draft=true | set enable_probabilistic_draft=false
MTP_VERIFY enable_probabilistic_draft=true | set enable_probabilistic_draft=false
[width]
VERIFY num_speculative_tokens=6 | use 5 or 7
MTP_VERIFY num_speculative_tokens=3 | use 5 or 7
DSPARK num_speculative_tokens=8 | use at most 7
[draft_is_usable]
DSPARK model=/m | speculative_algorithm=DSpark | draft_model
speculative_algorithm=MTP | set speculative_algorithm=DSpark
[nothing_ignored]
enable_graph=false python_graph_backend=cpugraph | drop it or set enable_graph=true
draft_model=/d | set speculative_algorithm=DSpark or MTP
num_speculative_tokens=5 | set speculative_algorithm=DSpark or MTP
enable_probabilistic_draft=true | drop it
VERIFY adaptive_draft_step_config=c.json | set enable_adaptive_draft_step=true
DSPARK adaptive_target_verify_calibration=f.json | set enable_adaptive_target_verify=true
DSPARK adaptive_target_verify_cost_table=f.json | set enable_adaptive_target_verify=true
DSPARK adaptive_target_verify_cost_table_output=f.json | set enable_adaptive_target_verify=true
[cost_table_excludes]
VERIFY adaptive_target_verify_cost_table=t adaptive_target_verify_calibration=c | drop one of them
VERIFY adaptive_target_verify_cost_table=t adaptive_target_verify_cost_table_output=o | drop one of them
[bucket_limit]
graph_decode_batch_size_limit=16 | lower max_seqs_per_batch
[backends_fit_device]
device=cpu python_graph_backend=aclgraph | use cpugraph or auto
device=cpu npu_kernel_backend=TORCH | set device=npu
python_graph_backend=cpugraph npu_kernel_backend=TORCH | set device=npu
[ranks]
nnodes=2 node_rank=2 | use 0..1
dp_size=2 | change one of them
master_node_addr=somewhere | write host:port
[context_length]
max_model_len=9000 | use at most 8192
"""


def cases() -> Iterator[tuple[str, dict[str, Any], str, str]]:
    rule = ""
    for line in VIOLATIONS.strip().splitlines():
        if line.startswith("["):
            rule = line.strip("[]")
            continue
        words, *named, remedy = line.split(" | ")
        options: dict[str, Any] = {}
        for word in words.split():
            name, _, text = word.partition("=")
            if name in WORDS:
                options |= WORDS[name]
            else:
                options[name] = (text,) if name == "retired" else flags_by_name()[name].parse(text)
        fault = named[0] if named else words.split()[-1].removeprefix("retired=")
        yield rule, options, fault, remedy


@pytest.mark.parametrize(("rule", "options", "fault", "remedy"), list(cases()))
def test_rule_names_flag_value_and_remedy(
    rule: str, options: dict[str, Any], fault: str, remedy: str
) -> None:
    found = problems(options)
    assert [p for p in found if fault in p and remedy in p], found


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, *_ in cases()} == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    ("checkpoint", "fault"),
    [
        (draft(block_size=None), "no DSpark draft"),
        (draft(enable_confidence_head=None), "no confidence head"),
        (draft(enable_confidence_head=False), "no confidence head"),
        (draft(block_size=5), "use at most 5"),
        (draft(vocab_size=1000), "vocab_size is 1000, the target's is 49152"),
    ],
)
def test_draft_must_fit(checkpoint: Checkpoint, fault: str) -> None:
    found = problems({**VERIFY, "draft_model": "/d"}, draft=checkpoint)
    assert any(fault in p for p in found), found


def test_fixed_width_needs_no_confidence_head_and_any_width_of_the_block() -> None:
    for width in (1, 3, 7):
        options = {"speculative_algorithm": "DSpark", "num_speculative_tokens": width}
        config = resolved(options, draft=draft(enable_confidence_head=None))
        assert config.draft_width == width
        assert config.speculation is not None
        assert config.speculation.calibration is None
        assert config.target_tiers(4) == (4 * (width + 1),)


NOT_YET = [
    ({"speculative_algorithm": "MTP", **MODEL}, "speculative_algorithm=MTP"),
    ({"nnodes": 2}, "nnodes=2"),
    ({"nproc_per_node": 2}, "nproc_per_node=2"),
    ({"speculative_algorithm": "DSpark", "enable_unified_mtp_graph": True}, "enable_unified_mtp_graph=true"),
    (
        {"speculative_algorithm": "DSpark", "enable_probabilistic_draft": True},
        "enable_probabilistic_draft=true",
    ),
    ({"enable_pd_disaggregation": True}, "enable_pd_disaggregation=true"),
    ({"enable_task_pipeline": False}, "enable_task_pipeline=false"),
    ({"disable_graph_warmup": True}, "disable_graph_warmup=true"),
    ({"decision_log": "d.jsonl"}, "decision_log=d.jsonl"),
    ({"log_dir": "logs"}, "log_dir=logs"),
]


@pytest.mark.parametrize(("options", "fault"), NOT_YET)
def test_not_available_yet(options: dict[str, Any], fault: str) -> None:
    (problem,) = problems(options)
    assert fault in problem
    assert "not available yet" in problem


@pytest.mark.parametrize(("kind", "backend"), [("npu", "aclgraph"), ("cuda", "cudagraph")])
def test_present_accelerator_is_not_available_yet(kind: str, backend: str) -> None:
    (problem,) = problems({"device": kind, "python_graph_backend": backend}, devices=(kind, "cpu"))
    assert (
        f"device={kind} and python_graph_backend={backend}: running on {kind} is not available yet" in problem
    )


def test_auto_takes_the_best_device_that_this_build_runs_on() -> None:
    assert resolved({}, devices=("cuda", "cpu")).device.kind == "cpu"


@pytest.mark.parametrize(
    "options",
    [
        {"device": "npu"},
        {"python_graph_backend": "aclgraph"},
        {"npu_kernel_backend": "TORCH", "nnodes": 16, "model": "/nowhere"},
    ],
)
def test_absent_device_is_one_message(options: dict[str, Any]) -> None:
    missing = Checkpoint(path=Path("/nowhere"), config=None, problem="does not exist")
    with pytest.raises(DeviceUnavailable) as caught:
        resolved(options, target=missing)
    assert caught.value.exit_code == ExitCode.DEVICE
    assert "device npu" in str(caught.value)
    assert "torch_npu is not installed" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_come_before_an_absent_device() -> None:
    found = problems({"device": "npu", "page_size": 0, "nnodes": 2})
    assert ["page_size=0" in found[0], "nnodes=2" in found[1], "device npu" in found[2]] == [True] * 3


def test_all_violations_at_once_in_order() -> None:
    missing = Checkpoint(path=Path("/m"), config=None, problem="does not exist")
    options = {
        **VERIFY,
        **MODEL,
        "num_speculative_tokens": 6,
        "enable_graph": False,
        "nproc_per_node": 2,
        "decision_log": "d",
        "kv_cache_gb": 1000.0,
    }
    found = problems(options, target=missing, output_problem="")
    expected = [
        "enable_graph=false",
        "num_speculative_tokens=6",
        "nproc_per_node=2",
        "decision_log=d",
        "kv_cache_gb=1000.0",
        "model=/m",
    ]
    for fragment, problem in zip(expected, found, strict=True):
        assert problem.startswith(fragment), found


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"target": Checkpoint(path=None, config=None, problem="the built-in model is not installed")},
            "is not installed",
        ),
        (
            {"draft": Checkpoint(path=Path("/d"), config=None, problem="does not exist")},
            "draft_model=/d does not exist",
        ),
        ({"output_problem": "/o exists already: name a new file"}, "/o exists already"),
        (
            {"calibration": Document(source="c.json", problem="cannot read c.json")},
            "calibration=c.json: cannot read",
        ),
    ],
)
def test_path_faults(changes: dict[str, Any], fault: str) -> None:
    options = {**VERIFY, "adaptive_target_verify_calibration": "c.json"}
    if "draft" in changes:
        options["draft_model"] = "/d"
    (problem,) = problems(options, **changes)
    assert fault in problem


def test_defaults_are_made_concrete() -> None:
    config = resolved({})
    assert config.model.dtype == "bfloat16"
    assert config.model.max_model_len == 4096
    assert config.model.served_name == "SmolLM2-135M-Instruct"
    assert config.schedule.request_buckets == (1, 2, 4, 8, 16, 32)
    assert config.schedule.lag == 2
    assert config.device.graph_backend == "cpugraph"
    assert config.device.num_threads == 4
    assert config.speculation is None
    assert config.target_tiers(8) == (8,)
    assert resolved({}, fast_bfloat16=False).model.dtype == "float32"
    assert resolved({"enable_graph": False}).device.graph_backend == "none"


def test_served_name_of_directory_and_hub_id() -> None:
    snapshot = Checkpoint(path=Path("/cache/snapshots/0123"), config=BUILTIN_CONFIG)
    assert resolved({"model": "org/name"}, target=snapshot).model.served_name == "org/name"
    directory = Checkpoint(path=Path("/models/tiny"), config=BUILTIN_CONFIG)
    assert resolved({"model": "/models/tiny"}, target=directory).model.served_name == "tiny"


def test_the_default_kv_size_is_a_share_of_the_memory_that_this_process_may_use() -> None:
    assert resolved({}).cache.kv_cache_bytes == 16 * 2**30
    assert resolved({}, memory_bytes=2**30).cache.kv_cache_bytes == 2**28
    assert resolved({}, memory_bytes=0).cache.kv_cache_bytes is None
    assert resolved({"kv_cache_gb": 0.5}).cache.kv_cache_bytes == 2**29
