"""The command line: how flags are written, where values come from, and what a wrong launch ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from core.errors import ExitCode
from core.facts import find_devices
from core.options import Group
from xspec_cli import reference
from xspec_cli.main import COMMANDS, cli

NPU_LAUNCH = (
    "serve --model=/models/target --draft_model=/models/dspark --backend=llm --model_impl=python "
    "--npu_kernel_backend=TORCH --nnodes=16 --node_rank=0 --host=127.0.0.1 --port=8000 "
    "--master_node_addr=127.0.0.1:27000 --enable_graph=true --python_graph_backend=aclgraph "
    "--disable_graph_warmup=false --enable_schedule_overlap=true --enable_task_pipeline=true "
    "--enable_unified_mtp_graph=false --dp_size=1 --cp_size=1 --max_seqs_per_batch=16 "
    "--acl_graph_decode_batch_size_limit=16 "
)
DSPARK_VERIFY = (
    "--speculative_algorithm=DSpark --num_speculative_tokens=7 --enable_adaptive_target_verify=true "
    "--adaptive_target_verify_cost_table_output=/results/dspark-costs.json"
)
MTP = "--speculative_algorithm=MTP --num_speculative_tokens=5 "


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the developer's counts, and a launch that is not refused fails instead of starting."""
    monkeypatch.delattr("core.launcher.launch_server")
    for name in list(os.environ):
        if name.startswith("XSPEC_"):
            monkeypatch.delenv(name)


def xspec(line: str, **environ: str) -> Result:
    return CliRunner().invoke(cli, line.split(), env=environ)


def shown(line: str = "", **environ: str) -> dict[str, Any]:
    """name -> [value, source]"""
    result = xspec(f"config show --json {line}", **environ)
    assert result.exit_code == 0, result.output
    return {name: [row["value"], row["source"]] for name, row in json.loads(result.stdout).items()}


def refused(line: str, code: ExitCode, **environ: str) -> str:
    """Stderr of a command that ends with `code`, which is short and no traceback."""
    result = xspec(line, **environ)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result.stderr


@pytest.mark.skipif("npu" in find_devices()[0], reason="this machine has an NPU")
@pytest.mark.parametrize(
    "flags",
    [
        DSPARK_VERIFY,
        MTP + "--enable_adaptive_draft_step=true",
        MTP + "--enable_adaptive_target_verify=true --enable_probabilistic_draft=false",
    ],
)
def test_npu_launch_lines_end_with_one_message_about_the_device(flags: str) -> None:
    message = refused(NPU_LAUNCH + flags, ExitCode.DEVICE)
    assert message.startswith("error: device npu")
    assert message.count("\n") == 1


def test_underscores_and_dashes_are_alike() -> None:
    for line in ("--page_size=32", "--page-size=32", "--page-size 32", "--page_size 32"):
        assert shown(line)["page_size"] == [32, "command line"]
    assert shown("--acl-graph_decode-batch_size_limit=64")["graph_decode_batch_size_limit"][0] == 64


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--enable_graph", True),
        ("--enable-graph=true", True),
        ("--enable_graph=false", False),
        ("--enable_graph=False", False),
        ("--enable_graph false", False),
        ("--enable_graph --port=1", True),
    ],
)
def test_booleans(line: str, value: bool) -> None:
    assert shown(line)["enable_graph"] == [value, "command line"]


def test_bare_boolean_leaves_the_next_argument_alone() -> None:
    assert "unexpected extra argument (text)" in refused("config show --enable_graph text", ExitCode.USAGE)


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "xspec.toml"
    file.write_text('port = 1001\nhost = "file"\n"page-size" = 64\nenable_graph = false\ndrain_timeout = 5\n')
    found = shown(f"--config={file} --port=1003", XSPEC_PORT="1002", XSPEC_HOST="environment")
    assert found["port"] == [1003, "command line"]
    assert found["host"] == ["environment", "environment"]
    assert found["page_size"] == [64, "file"]
    assert found["enable_graph"] == [False, "file"]
    assert found["drain_timeout"] == [5.0, "file"]
    assert found["max_queue"] == [256, "default"]
    assert shown(XSPEC_CONFIG=str(file))["port"] == [1001, "file"]


def test_environment_takes_aliases_and_ignores_empty_values() -> None:
    found = shown(XSPEC_ACL_GRAPH_DECODE_BATCH_SIZE_LIMIT="64", XSPEC_PORT="")
    assert found["graph_decode_batch_size_limit"] == [64, "environment"]
    assert found["port"] == [8000, "default"]


def test_environment_faults_are_reported_together() -> None:
    message = refused("config show", ExitCode.CONFIG, XSPEC_PORT="high", XSPEC_ENABLE_GRAPH="maybe")
    assert "XSPEC_PORT='high': expected a whole number" in message
    assert "XSPEC_ENABLE_GRAPH='maybe': expected true or false" in message


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean port?"),
        ('port = "8000"', "port = '8000': expected a whole number"),
        ("enable_graph = 1", "enable_graph = 1: expected true or false"),
        ("port = 1\nport = 2", "is not valid TOML"),
        ("page-size = 1\npage_size = 2", "are one flag: keep one of them"),
        ("[serve]\nport = 1", "unknown key 'serve'"),
    ],
)
def test_file_faults(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "xspec.toml"
    file.write_text(text)
    message = refused(f"config show --config={file}", ExitCode.CONFIG)
    assert fault in message
    assert str(file) in message


def test_missing_file_is_a_configuration_error() -> None:
    assert "cannot be read" in refused("serve --config=/none.toml", ExitCode.CONFIG)


@pytest.mark.parametrize("name", ["enable_adaptive_spec_prune", "enable_adaptive_speculative_decode"])
def test_retired_names_are_refused_wherever_they_stand(tmp_path: Path, name: str) -> None:
    file = tmp_path / "xspec.toml"
    file.write_text(f"{name} = true")
    for line, environ in (
        (f"--{name}", {}),
        (f"--{name.replace('_', '-')}=true", {}),
        ("", {f"XSPEC_{name.upper()}": "true"}),
        (f"--config={file}", {}),
    ):
        message = refused(f"config show --effective {line}", ExitCode.CONFIG, **environ)
        assert f"{name} is a retired name" in message
        assert "use enable_adaptive_target_verify" in message


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("serve --enable_adaptive_target_verfy", "enable-adaptive-target-verify"),
        ("serve --port=high", "expected a whole number"),
        ("serve --enable_graph=maybe", "expected true or false"),
        ("serve --port", "requires an argument"),
        ("srve", "did you mean serve?"),
        ("serve extra", "unexpected extra argument"),
    ],
)
def test_usage_errors(line: str, fault: str) -> None:
    message = refused(line, ExitCode.USAGE)
    assert fault in message
    assert message.startswith("error: ")
    assert message.count("\n") == 1


def test_all_violations_are_listed() -> None:
    message = refused("serve --page_size=0 --nnodes=2 --model=/none", ExitCode.CONFIG)
    lines = message.splitlines()
    assert lines[0] == "error: 3 settings are refused:"
    assert [line.split("=")[0] for line in lines[1:]] == ["  - page_size", "  - nnodes", "  - model"]


def test_help_has_few_groups_and_every_flag() -> None:
    for switch in ("-h", "--help"):
        text = xspec(f"serve {switch}").stdout
        headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
        assert headings == ["Options:", *(f"{group}:" for group in Group)]
        assert len(headings) <= 8
        assert "--enable_graph[=true|false]" in text
        assert "enable_adaptive_spec_prune" not in text


def test_schema_names_every_flag() -> None:
    properties = json.loads(xspec("config schema").stdout)["properties"]
    assert properties["port"] == {
        "type": "integer",
        "description": "Port to listen on; 0 takes a free one.",
        "minimum": 0,
        "maximum": 65535,
        "default": 8000,
    }
    assert set(shown()) | {"acl_graph_decode_batch_size_limit"} == set(properties)


def test_effective_configuration() -> None:
    result = xspec("config show --effective --device=cpu --max_seqs_per_batch=4 --dtype=float32")
    tree = json.loads(result.stdout)
    assert tree["schedule"]["request_buckets"] == [1, 2, 4]
    assert tree["model"]["dtype"] == "float32"
    assert tree["sources"]["dtype"] == "command line"


def test_version_and_doctor() -> None:
    assert json.loads(xspec("version --json").stdout)["torch"]
    report = json.loads(xspec("doctor --json", XSPEC_PROT="1").stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert found["device cpu"]["status"] == "ok"
    assert found["XSPEC_PROT"]["detail"].endswith("did you mean XSPEC_PORT?")
    broken = xspec("doctor", XSPEC_ENABLE_ADAPTIVE_SPEC_PRUNE="1")
    assert broken.exit_code == ExitCode.UNEXPECTED


def test_help_imports_no_torch_and_no_subcommand() -> None:
    """What `xspec --help` costs is what it imports; torch alone takes seconds."""
    code = (
        "import sys\nfrom xspec_cli.main import cli\n"
        "try: cli(['--help'], prog_name='xspec')\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'rich', 'fastapi', 'pydantic', 'xspec_cli.serve'}\n"
        "sys.exit(bool(heavy & set(sys.modules)) * 50)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_commands_of_a_launch_import_no_torch() -> None:
    code = (
        "import sys\nfrom xspec_cli.main import cli\n"
        "try: cli(['serve', '--nnodes=2'], prog_name='xspec')\n"
        "except SystemExit as end: sys.exit(50 if 'torch' in sys.modules else end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.CONFIG, done.stderr
    assert done.stderr.startswith("error: nnodes=2: several ranks are not available yet")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), ([], 2), (["serve", "--nope"], 2), (["serve", "--model=/none"], 3), (["version"], 0)],
)
def test_exit_codes_of_the_process(arguments: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "xspec_cli", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_reference_covers_every_command() -> None:
    text = reference.render()
    assert text == reference.render()
    for name in COMMANDS:
        assert f"### xspec {name}\n" in text
