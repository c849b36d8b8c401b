"""What the support matrix allows but this build cannot run yet. An entry goes when its feature comes."""

from __future__ import annotations

from core.options import LaunchOptions
from core.rules import requested_device, shown

RUNNABLE_DEVICES = ("cpu",)
# The one value of a flag that this build runs.
RUNNABLE_VALUES = {
    "enable_unified_mtp_graph": False,
    "enable_probabilistic_draft": False,
    "enable_pd_disaggregation": False,
    "enable_task_pipeline": True,
    "disable_graph_warmup": False,
    "decision_log": None,
    "log_dir": None,
}


def not_available_yet(options: LaunchOptions) -> list[str]:
    """Every setting that this build refuses for now, the device apart: flag with value, and what to do."""
    problems = []
    if options.speculative_algorithm == "MTP":
        problems.append("speculative_algorithm=MTP is not available yet: use DSpark or none")
    ranks = [name for name in ("nnodes", "nproc_per_node") if getattr(options, name) > 1]
    if ranks:
        named = " and ".join(shown(options, name) for name in ranks)
        problems.append(f"{named}: several ranks are not available yet: use nnodes=1 and nproc_per_node=1")
    for name, runnable in RUNNABLE_VALUES.items():
        if getattr(options, name) != runnable:
            remedy = "drop it" if runnable is None else f"set {name}={str(runnable).lower()}"
            problems.append(f"{shown(options, name)} is not available yet: {remedy}")
    return problems


def device_not_available_yet(options: LaunchOptions) -> list[str]:
    """The same for the device that the flags ask for."""
    kind, why = requested_device(options)
    if kind is None or kind in RUNNABLE_DEVICES:
        return []
    return [
        f"{' and '.join(why)}: running on {kind} is not available yet: "
        f"use device=cpu without flags for {kind}"
    ]
