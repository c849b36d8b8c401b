"""Cost files: what fits a launch loads, all else is refused with the reason; nothing is half written."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from core.config import CalibrationConfig, ContextConfig
from core.errors import CalibrationError, ConfigError, ExitCode
from core.spec.cost_table import (
    Compatibility,
    CostBundle,
    CostProfile,
    CostProfiles,
    LoadedCosts,
    canonical_sha256,
    check_output_path,
    load_costs,
    profiles_from_json,
    profiles_of,
    write_bundle,
)
from core.spec.costs import CostSample, SpsCost, fit_costs
from core.spec.depth_costs import fit_depth_costs

W = 7
TIERS = {1: (1, 2, 4, 8), 2: (2, 4, 8, 16), 4: (4, 8, 16, 32)}
COMPATIBILITY = Compatibility(
    target_sha256="aa" * 32,
    draft_sha256="bb" * 32,
    dtype="bfloat16",
    device="cpu:test",
    torch="2.13.0",
    graph_backend="cpugraph",
    unified_mtp_graph=False,
    tp_size=1,
    dp_size=1,
    cp_size=1,
    world_size=1,
    page_size=16,
    max_model_len=4096,
    captured_request_buckets=(1, 2, 4),
    captured_target_rows=TIERS,
    num_threads=2,
    attention_backend="grouped",
    enable_schedule_overlap=True,
)
OTHER_VALUES: dict[str, object] = {
    "captured_request_buckets": (1, 2),
    "captured_target_rows": {**TIERS, 4: (4, 32)},
}


def make_bundle(buckets: tuple[int, ...] = (1, 2, 4)) -> CostBundle:
    contexts = tuple(
        ContextConfig(prefill_tokens=p, min_kv_length=low, max_kv_length=high)
        for p, low, high in ((128, 1, 512), (1024, 513, 4096))
    )
    profiles = []
    for i, context in enumerate(contexts):
        samples = [
            CostSample(request_bucket=b, target_rows=g, seconds=(0.01 * (i + 1) + 1e-4 * g + 1e-3 * b,))
            for b in buckets
            for g in TIERS[b]
        ]
        fit = fit_costs(samples, "additive")
        profiles.append(
            CostProfile(
                context=context,
                table=fit.model,
                max_relative_error=fit.max_relative_error,
                mean_relative_error=fit.mean_relative_error,
                samples=tuple(samples),
            )
        )
    calibration = CalibrationConfig(
        source="defaults",
        model="additive",
        request_buckets=buckets,
        target_graph_rows={b: TIERS[b] for b in buckets},
        contexts=contexts,
        warmup_steps=8,
        window_steps=32,
        windows_per_point=3,
        token_seed=1,
    )
    return CostBundle(
        algorithm="DSpark",
        draft_width=W,
        compatibility=COMPATIBILITY,
        calibration=calibration,
        profiles=tuple(profiles),
    )


def load(path: Path, **changes: Any) -> LoadedCosts:
    launch: dict[str, Any] = {"algorithm": "DSpark", "draft_width": W, "compatibility": COMPATIBILITY}
    return load_costs(path, **{**launch, **changes})


def refusal(path: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **changes)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value)


@pytest.fixture
def bundle_file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    write_bundle(path, make_bundle())
    return path


def rewrite(path: Path, change: Any, *, sign: bool = True) -> Path:
    """Apply `change` to the file's object; `sign` makes it look untouched."""
    content = json.loads(path.read_text())
    change(content)
    if sign:
        content["sha256"] = canonical_sha256(content)
    path.write_text(json.dumps(content))
    return path


def test_a_bundle_comes_back_as_it_was_written(bundle_file: Path) -> None:
    loaded = load(bundle_file)
    bundle = make_bundle()
    assert loaded.source == "saved bundle"
    assert loaded.profiles == profiles_of(bundle)
    assert loaded.calibration == dataclasses.replace(bundle.calibration, source="saved bundle")
    assert loaded.warnings == ()


def test_lookup_by_context_and_bucket(bundle_file: Path) -> None:
    profiles = load(bundle_file).profiles
    short, long = (p.table for p in make_bundle().profiles)
    for length, expected in [(1, short), (512, short), (513, long), (4096, long), (4097, None)]:
        assert profiles.lookup(length, 4) == expected
    assert profiles.lookup(100, 8) is None


def test_profiles_travel_to_other_ranks(bundle_file: Path) -> None:
    profiles = load(bundle_file).profiles
    assert profiles_from_json(json.loads(json.dumps(profiles.to_json()))) == profiles


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Compatibility)])
def test_every_compatibility_field_is_compared(bundle_file: Path, field: str) -> None:
    saved = getattr(COMPATIBILITY, field)
    current: Any = OTHER_VALUES.get(field)
    if current is None:
        current = (not saved) if isinstance(saved, bool) else saved + 1 if isinstance(saved, int) else "other"
    message = refusal(bundle_file, compatibility=dataclasses.replace(COMPATIBILITY, **{field: current}))
    assert f"{field} differs: saved " in message
    assert "current " in message
    if isinstance(current, str | int) and not isinstance(current, bool):
        assert json.dumps(saved) in message
        assert json.dumps(current) in message


def test_algorithm_and_width_are_compared(bundle_file: Path) -> None:
    message = refusal(bundle_file, algorithm="MTP", draft_width=5)
    assert "algorithm differs: saved DSpark, current MTP" in message
    assert "draft_width differs: saved 7, current 5" in message


def test_a_truncated_file_is_refused_at_every_cut(bundle_file: Path) -> None:
    content = bundle_file.read_bytes()
    for length in range(0, len(content) - 1, 50):
        bundle_file.write_bytes(content[:length])
        assert "not valid JSON" in refusal(bundle_file)


def test_edited_values_are_refused(bundle_file: Path) -> None:
    def cheaper(content: Any) -> None:
        content["profiles"][0]["table"]["bias_seconds"] *= 0.5

    assert "sha256" in refusal(rewrite(bundle_file, cheaper, sign=False))


def test_an_unsigned_bundle_is_refused(bundle_file: Path) -> None:
    assert "$.sha256 is missing" in refusal(rewrite(bundle_file, _drop("sha256"), sign=False))


def test_layout_of_the_text_does_not_matter(bundle_file: Path) -> None:
    rewrite(bundle_file, lambda content: None, sign=False)
    assert load(bundle_file).source == "saved bundle"


def _set(*path: Any, value: object) -> Any:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def _drop(*path: Any) -> Any:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("kind", value="other.bundle"), '$.kind must be "xspec.cost_bundle"'),
        (_set("version", value=2), "$.version must be 1"),
        (_set("version", value=True), "$.version must be 1"),
        (_set("algorithm", value="EAGLE"), "$.algorithm"),
        (_set("mode", value="draft_step"), "$.mode"),
        (_set("surprise", value=1), "$.surprise is not a known key"),
        (_set("compatibility", "surprise", value=1), "$.compatibility.surprise"),
        (_drop("compatibility", "page_size"), "$.compatibility.page_size is missing"),
        (_set("compatibility", "tp_size", value="1"), "$.compatibility.tp_size"),
        (_set("calibration", "window_steps", value=0), "$.calibration.window_steps"),
        (_set("calibration", "contexts", 1, "min_kv_length", value=512), "$.calibration.contexts[1]"),
        (_drop("profiles", 1), "$.profiles must hold one profile per entry"),
        (_set("profiles", 0, "samples", 0, "seconds", value=[]), "$.profiles[0].samples[0].seconds"),
        (_set("profiles", 0, "table", "bias_seconds", value=0), "$.profiles[0].table"),
        (
            _drop("profiles", 1, "table", "theta_seconds", "32"),
            "$.profiles[1].table has no cost of full width",
        ),
        (_drop("calibration"), "$.calibration is missing"),
    ],
)
def test_malformed_bundles_are_refused_with_the_place(bundle_file: Path, change: Any, words: str) -> None:
    assert words in refusal(rewrite(bundle_file, change))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[]", "must be a cost bundle or a cost table"),
        ("{}", "$.kind"),
        ('{"model": "sps", "steps_per_second": {"8": NaN}}', "NaN"),
        ('{"model": "sps", "model": "sps", "steps_per_second": {"8": 1}}', "twice"),
        ('{"model": "sps", "steps_per_second": {"8": 1e999}}', "finite"),
        ("\x00\x01", "not valid JSON"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    assert words in refusal(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    assert "cannot read" in refusal(tmp_path / "none.json")


def write_table(path: Path, rows: list[int], **extra: object) -> Path:
    path.write_text(
        json.dumps({"model": "sps", "steps_per_second": {str(g): 1000 / g for g in rows}, **extra})
    )
    return path


def test_a_bare_table_loads_unverified(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.json", [1, 2, 4, 8, 16, 32], draft_width=W)
    loaded = load(path)
    assert loaded.source == "bare table"
    assert loaded.calibration is None
    assert "unverified" in loaded.warnings[0]
    assert isinstance(loaded.profiles.lookup(4096, 4), SpsCost)
    assert loaded.profiles.lookup(4097, 4) is None


def test_a_legacy_table_counts_as_width_seven(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.json", [1, 2, 4, 8, 16, 32])
    assert load(path).source == "bare table"
    five = dataclasses.replace(COMPATIBILITY, captured_target_rows={1: (1, 6)}, captured_request_buckets=(1,))
    assert "saved 7 (a table without" in refusal(path, draft_width=5, compatibility=five)


def test_a_bare_table_needs_full_width_of_what_it_covers(tmp_path: Path) -> None:
    assert "32 rows) for request bucket 4" in refusal(write_table(tmp_path / "a.json", [1, 2, 4, 8, 16]))
    assert "covers none" in refusal(write_table(tmp_path / "b.json", [100]))


def test_costs_of_draft_steps_are_never_loaded(tmp_path: Path) -> None:
    samples = {
        depth: [CostSample(request_bucket=b, target_rows=b * (depth + 1), seconds=(0.01,)) for b in (1, 2)]
        for depth in range(3)
    }
    path = tmp_path / "depths.json"
    path.write_text(json.dumps(fit_depth_costs(samples, "additive").to_json()))
    assert "never loaded" in refusal(path, algorithm="MTP")


def test_output_paths_are_checked_without_touching_them(tmp_path: Path) -> None:
    assert check_output_path(tmp_path / "new.json") is None
    assert list(tmp_path.iterdir()) == []
    assert "not a directory" in str(check_output_path(tmp_path / "no" / "new.json"))
    (tmp_path / "old.json").touch()
    assert "exists already" in str(check_output_path(tmp_path / "old.json"))
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    assert "exists already" in str(check_output_path(tmp_path / "dangling.json"))


def test_an_existing_file_is_never_replaced(bundle_file: Path) -> None:
    before = bundle_file.read_bytes()
    with pytest.raises(CalibrationError, match="exists already") as caught:
        write_bundle(bundle_file, make_bundle())
    assert str(bundle_file) in str(caught.value)
    assert caught.value.exit_code == ExitCode.CALIBRATION
    assert bundle_file.read_bytes() == before
    assert list(bundle_file.parent.iterdir()) == [bundle_file]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    room = 1000

    def write_until_full(descriptor: int, data: Any) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room -= (written := write(descriptor, bytes(data)[:room]))
        return written

    monkeypatch.setattr(os, "write", write_until_full)
    path = tmp_path / "costs.json"
    with pytest.raises(CalibrationError, match="No space left") as caught:
        write_bundle(path, make_bundle())
    assert str(path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_without_hard_links_the_name_is_still_taken_exclusively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "costs.json"
    write_bundle(path, make_bundle())
    assert load(path).source == "saved bundle"
    with pytest.raises(CalibrationError, match="exists already"):
        write_bundle(path, make_bundle())
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_vanished_is_a_calibration_failure(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"gone/costs\.json"):
        write_bundle(tmp_path / "gone" / "costs.json", make_bundle())


def test_buckets_without_calibration_have_no_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_bundle(path, make_bundle(buckets=(1, 2)))
    profiles: CostProfiles = load(path).profiles
    assert profiles.lookup(100, 2) is not None
    assert profiles.lookup(100, 4) is None
