"""API keys: who is let in, what others are told, and that no key is shown anywhere."""

# Fixtures are imported by name, then taken as arguments.
# ruff: noqa: F401, F811

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from click.testing import CliRunner

from core.api_keys import ApiKeys, find_api_keys
from core.config import to_plain, without_secrets
from core.config_codec import decode_config, encode_config
from core.launcher import for_ranks
from core.ranks import rank_environment
from tests.http_rig import REPLY, Rig, assert_error, make_rig
from tests.launch_facts import problems, resolved
from xspec_cli.main import cli

KEY = "sk-first.Key_0"
OTHER = "sk-second"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def closed(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(api_keys=(KEY, OTHER))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_open_what_is_closed_to_others(closed: Rig) -> None:
    body = {"model": "tiny", "prompt": "hi"}
    wrong = [{}, bearer(KEY + "x"), bearer(KEY[:-1]), bearer(digest(KEY)), bearer(KEY.upper())]
    wrong += [{"authorization": KEY}, {"authorization": f"Basic {KEY}"}, {"authorization": f"Bearer{KEY}"}]
    wrong += [{"authorization": b"Bearer \xff\xfe"}, {"x-api-key": KEY}]  # type: ignore[dict-item]
    for headers in wrong:
        refused = closed.client.post("/v1/completions", json=body, headers=headers)
        error = assert_error(refused, 401)
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert refused.headers["www-authenticate"] == "Bearer"
        assert KEY not in refused.text
    for headers in (bearer(KEY), bearer(OTHER), {"authorization": f"bearer  {KEY}"}):
        response = closed.client.post("/v1/completions", json=body, headers=headers)
        assert response.json()["choices"][0]["text"] == REPLY
    assert closed.frontend.num_active == 0
    assert len(closed.engine.added) == 3
    assert closed.sample("xspec_requests_rejected_total", reason="unauthorized") == len(wrong)
    refused_by_route = {"handler": "/v1/completions", "method": "POST", "code": "401"}
    assert closed.sample("xspec_http_requests_total", **refused_by_route) == len(wrong)


def test_only_the_probes_need_no_key(closed: Rig) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert closed.client.get(path).status_code == 200
    documented = closed.client.get("/openapi.json", headers=bearer(KEY)).json()["paths"]
    assert {"/v1/models", "/v1/chat/completions", "/version"} <= set(documented)
    others = set(documented) - {"/health", "/ready", "/metrics"}
    others |= {"/openapi.json", "/docs", "/nope", "/v1/models/tiny", "/health/", "//health", "/metrics/x"}
    for path in others:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            assert closed.client.request(method, path).status_code == 401, (method, path)
    assert closed.sample("xspec_requests_rejected_total", reason="unauthorized") == 2 * 4


def test_the_official_client_with_and_without_the_key(closed: Rig) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        closed.openai.models.list()
    assert refused.value.code == "invalid_api_key"
    allowed = closed.openai.with_options(api_key=KEY)
    assert [model.id for model in allowed.models.list()] == ["tiny"]


def test_a_refused_body_is_not_read(closed: Rig) -> None:
    body = b"x" * (9 * 2**20)
    with contextlib.suppress(httpx.WriteError):  # the server may close while the client still writes
        assert_error(httpx.post(closed.url + "/v1/completions", content=body, timeout=5), 401)
    assert closed.client.get("/health").status_code == 200


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(f"  {KEY}\r\n\n{OTHER}\n{KEY}".encode())
    assert find_api_keys(str(file), {}) == ApiKeys(digests=(digest(KEY), digest(OTHER)))
    assert find_api_keys(None, {"XSPEC_API_KEY": KEY + "\n"}).digests == (digest(KEY),)
    assert find_api_keys(None, {}) == ApiKeys()


@pytest.mark.parametrize(
    ("content", "environ", "fault"),
    [
        (None, {}, "cannot be read (No such file"),
        ("", {}, "holds no key"),
        ("\n  \n", {}, "holds no key"),
        ("good\nwith space\n", {}, "key 2 cannot be sent"),
        ("schlüssel", {}, "key 1 cannot be sent"),
        ("x" * 70_000, {}, "is larger than"),
        ("good", {"XSPEC_API_KEY": "good"}, "exclude each other"),
        ("", {"XSPEC_API_KEY": ""}, "exclude each other"),
    ],
)
def test_what_is_wrong_with_a_key_file_is_a_sentence(
    tmp_path: Path, content: str | None, environ: dict[str, str], fault: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    found = find_api_keys(str(file), environ)
    assert fault in found.problem
    assert not found.digests
    assert not {"space", "schlüssel", "good"} & set(found.problem.split())


@pytest.mark.parametrize("value", ["", "  ", "a b", "k\x00y"])
def test_an_empty_or_odd_variable_is_no_open_server(value: str) -> None:
    found = find_api_keys(None, {"XSPEC_API_KEY": value})
    assert found.problem.startswith("the variable XSPEC_API_KEY")
    assert problems({}, api_keys=found) == [found.problem]


def test_keys_stay_with_the_http_server(tmp_path: Path) -> None:
    config = resolved({}, api_keys=ApiKeys(digests=(digest(KEY),)))
    assert config.server.api_key_digests == (digest(KEY),)
    assert decode_config(encode_config(config)) == config
    assert to_plain(config)["server"]["api_key_digests"] == "<redacted>"
    assert to_plain(resolved({}))["server"]["api_key_digests"] == []
    assert digest(KEY) not in repr(config)
    assert without_secrets(config) == resolved({})
    assert digest(KEY).encode() not in encode_config(for_ranks(config))
    env = rank_environment(
        config, local_rank=0, error_file=tmp_path / "e", base={"XSPEC_API_KEY": KEY, "A": "b"}
    )
    assert KEY not in env.values()
    assert env["A"] == "b"


def test_no_command_shows_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("XSPEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.delattr("core.launcher.launch_server")
    file = tmp_path / "keys"
    file.write_text(KEY)
    for arguments, environ in (
        (["config", "show"], {"XSPEC_API_KEY": KEY}),
        (["config", "show", "--json", f"--api_key_file={file}"], {}),
        (["config", "show", "--effective"], {"XSPEC_API_KEY": KEY}),
        (["config", "show", "--effective"], {"XSPEC_API_KEY_FILE": str(file)}),
        (["doctor", "--json"], {"XSPEC_API_KEY": KEY}),
    ):
        result = CliRunner().invoke(cli, arguments, env=environ)
        assert result.exit_code == 0, result.output
        assert KEY not in result.output
        assert digest(KEY) not in result.output
    shown = json.loads(
        CliRunner().invoke(cli, ["config", "show", "--effective"], env={"XSPEC_API_KEY": KEY}).stdout
    )
    assert shown["server"]["api_key_digests"] == "<redacted>"
    refused = CliRunner().invoke(cli, ["serve", f"--api_key_file={tmp_path / 'absent'}"])
    assert refused.exit_code == 3
    assert "cannot be read" in refused.stderr
    assert "No such option" in CliRunner().invoke(cli, ["serve", f"--api_key={KEY}"]).stderr
