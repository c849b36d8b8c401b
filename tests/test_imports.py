"""The import direction and the places where some things are allowed, as CONTRIBUTING.md states them.

Every module stands in one layer below. A module imports its own layer and lower ones, never a higher one. A
new module belongs into the table: put it where what it needs puts it, not where it happens to pass.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import core
import metrics
import xspec_cli

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. A name covers the module and everything below it; the longest match wins.
LAYERS: dict[str, tuple[str, ...]] = {
    "vocabulary": (
        "core",
        "core.builtin",
        "core.types",
        "core.errors",
        "core.config",
        "core.config_codec",
        "core.options",
        "core.engine",
        "core.engine.plan",
        "core.kvcache",
        "core.grammar",
        "core.logs",
        "core.spec",
        "core.vocabulary",
        "metrics",
        "dashboards",
    ),
    "policies": (
        "core.kvcache.pages",
        "core.engine.scheduler",
        "core.engine.sequence",
        "core.spec.allocation",
        "core.spec.budgets",
        "core.spec.confidence",
        "core.spec.calibration_config",
        "core.spec.cases",
        "core.spec.cost_bundle",
        "core.spec.cost_table",
        "core.spec.costs",
        "core.spec.depth_costs",
        "core.spec.draft_depth",
        "core.spec.draft_step_config",
        "core.spec.exclusive_file",
        "core.spec.json_reader",
        "core.spec.verify_budget",
    ),
    "devices": ("core.devices", "core.parallel"),
    "tensors": (
        "core.engine.batch",
        "core.engine.feedback",
        "core.engine.graphs",
        "core.engine.request_state",
        "core.kvcache.storage",
        "core.layers",
        "core.sampling",
        "core.shaping",
    ),
    "models": ("core.models",),
    "speculation": ("core.spec.drafts", "core.spec.speculator", "core.spec.verify"),
    "engine": (
        "core.engine.accounting",
        "core.engine.build",
        "core.engine.costs",
        "core.engine.loop",
        "core.engine.probing",
        "core.engine.service",
        "core.engine.worker",
        "core.spec.calibration",
    ),
    "launch": (
        "core.api_keys",
        "core.availability",
        "core.calibration_files",
        "core.calibration_plan",
        "core.facts",
        "core.launcher",
        "core.rank_main",
        "core.ranks",
        "core.resolve",
        "core.rules",
    ),
    "cli": ("xspec_cli",),
}
# Beside the layers: the server is a customer of the vocabulary only, and the launcher is its customer.
SERVER = "core.server"
SERVER_MAY_IMPORT = (SERVER, *LAYERS["vocabulary"])

WITHOUT_TORCH = ("vocabulary", "policies", "launch", "cli")
# The device half of an allocation stands beside its host twin; it imports torch inside its functions.
LOCAL_TORCH = ("core.spec.allocation", "xspec_cli")

DEVICE_NAMES = {"cuda", "npu", "torch_npu"}
MAY_NAME_DEVICES = (
    "core.devices",
    "core.config",
    "core.options",
    "core.facts",
    "core.resolve",
    "core.rules",
    "xspec_cli",
)

READS_TENSORS = {"item", "tolist", "cpu"}
# Retirement is the one place on the path of a step. Loading weights happens before there is a path.
MAY_READ_TENSORS = ("core.engine.feedback", "core.models.weights", "core.models.builtin", "xspec_cli")

MAY_READ_ENVIRONMENT = (
    "core.facts",
    "core.launcher",
    "core.logs",
    "core.ranks",
    "core.rank_main",
    "core.models.builtin",
    "xspec_cli",
)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the shipped packages, parsed, by dotted name."""
    found = {}
    for package in ("core", "metrics", "dashboards", "xspec_cli"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


def covers(prefix: str, module: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def layer_of(module: str) -> str | None:
    """Name the layer of a module: that of its longest entry, where a bare package covers only itself."""
    matches = [
        (prefix, layer)
        for layer, prefixes in LAYERS.items()
        for prefix in prefixes
        if module == prefix or (covers(prefix, module) and prefix not in BARE_PACKAGES)
    ]
    return max(matches, key=lambda match: len(match[0]))[1] if matches else None


BARE_PACKAGES = {"core", "core.engine", "core.kvcache", "core.spec"}


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a tree imports, as modules where they are modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute in this repository"
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                yield dotted if dotted in modules() else node.module


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)


def allowed(module: str, places: tuple[str, ...]) -> bool:
    return any(covers(place, module) for place in places)


def describe(faults: list[str]) -> str:
    return "\n  ".join(["", *sorted(faults)])


def test_packages_are_ours() -> None:
    for package in (core, metrics, xspec_cli):
        assert package.__file__ is not None
        assert Path(package.__file__).resolve().is_relative_to(ROOT)


def test_every_module_has_a_layer() -> None:
    faults = [name for name in modules() if layer_of(name) is None and not covers(SERVER, name)]
    assert not faults, f"add to LAYERS in {Path(__file__).name}:{describe(faults)}"


def test_lower_layers_never_import_higher_ones() -> None:
    order = list(LAYERS)
    faults = []
    for name, tree in modules().items():
        layer = layer_of(name)
        for target in set(imports(tree)):
            target_layer = layer_of(target)
            if layer is None or target not in modules():
                continue
            if covers(SERVER, target):
                # The messages are the server's border; ranks and launcher speak them.
                if order.index(layer) < order.index("engine"):
                    faults.append(f"{name} ({layer}) imports {target}")
            elif target_layer is not None and order.index(target_layer) > order.index(layer):
                faults.append(f"{name} ({layer}) imports {target} ({target_layer})")
    assert not faults, describe(faults)


def test_server_sees_only_the_vocabulary_and_metrics() -> None:
    faults = [
        f"{name} imports {target}"
        for name, tree in modules().items()
        if covers(SERVER, name)
        for target in set(imports(tree))
        if target in modules() and layer_of(target) != "vocabulary" and not covers(SERVER, target)
    ]
    assert not faults, describe(faults)


def test_metrics_is_a_leaf() -> None:
    faults = [
        f"{name} imports {target}"
        for name, tree in modules().items()
        if covers("metrics", name)
        for target in set(imports(tree))
        if target in modules() and not covers("metrics", target)
    ]
    assert not faults, describe(faults)


def test_no_torch_where_none_is_needed() -> None:
    faults = []
    for name, tree in modules().items():
        if layer_of(name) not in WITHOUT_TORCH and not covers(SERVER, name):
            continue
        found = top_level_imports(tree) if allowed(name, LOCAL_TORCH) else imports(tree)
        faults += [f"{name} imports {target}" for target in set(found) if covers("torch", target)]
    assert not faults, describe(faults)


def device_names(tree: ast.AST) -> Iterator[str]:
    """Names of accelerators in code: attributes, variables, imports, and strings such as "cuda:0"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in DEVICE_NAMES:
            yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.Name) and node.id in DEVICE_NAMES:
            yield f"line {node.lineno}: {node.id}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.partition(":")[0] in DEVICE_NAMES:
                yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (f"line {node.lineno}: {t}" for t in imports(node) if DEVICE_NAMES & set(t.split(".")))


def test_accelerators_are_named_in_devices_only() -> None:
    faults = [
        f"{name} {place}"
        for name, tree in modules().items()
        if not allowed(name, MAY_NAME_DEVICES)
        for place in device_names(tree)
    ]
    assert not faults, describe(faults)


def test_tensors_are_read_back_in_one_file() -> None:
    """`.item()`, `.tolist()` and `.cpu()` wait for the device. Only torch code is judged: numpy's do not."""
    faults = [
        f"{name} line {node.lineno}: .{node.func.attr}()"
        for name, tree in modules().items()
        if covers("core", name) and "torch" in set(imports(tree)) and not allowed(name, MAY_READ_TENSORS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in READS_TENSORS
        and not node.args
    ]
    assert not faults, describe(faults)


def test_environment_is_read_at_the_edges() -> None:
    faults = [
        f"{name} line {node.lineno}"
        for name, tree in modules().items()
        if not allowed(name, MAY_READ_ENVIRONMENT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in {"environ", "getenv"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert not faults, describe(faults)


# rich as a drawing library: reports become text there, and the CLI prints it.
MAY_DRAW = ("metrics.console",)


@pytest.mark.parametrize("library", ["click", "rich"])
def test_only_the_cli_talks_to_people(library: str) -> None:
    faults = [
        f"{name} imports {target}"
        for name, tree in modules().items()
        if not covers("xspec_cli", name) and not (library == "rich" and allowed(name, MAY_DRAW))
        for target in set(imports(tree))
        if covers(library, target)
    ]
    assert not faults, describe(faults)
