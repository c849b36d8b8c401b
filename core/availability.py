"""What the support matrix allows but this build cannot run yet. An entry goes when its feature comes."""

from __future__ import annotations

from core.options import LaunchOptions
from core.rules import requested_device, shown

RUNNABLE_DEVICES = ("cpu",)


def not_available_yet(options: LaunchOptions) -> list[str]:
    """Every setting that this build refuses for now, the device apart: flag with value, and what to do."""
    problems = []
    if options.speculative_algorithm == "MTP":
        problems.append("speculative_algorithm=MTP is not available yet: use DSpark or none")
    ranks = [name for name in ("nnodes", "nproc_per_node") if getattr(options, name) > 1]
    if ranks:
        named = " and ".join(shown(options, name) for name in ranks)
        problems.append(f"{named}: several ranks are not available yet: use nnodes=1 and nproc_per_node=1")
    flags = {
        "enable_unified_mtp_graph": "set it to false",
        "enable_probabilistic_draft": "set it to false",
        "enable_pd_disaggregation": "set it to false",
        "decision_log": "drop it",
        "log_dir": "drop it",
    }
    for name, remedy in flags.items():
        if getattr(options, name) not in (False, None):
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
