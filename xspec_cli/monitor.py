"""Ask a server how it is, over HTTP and with the standard library alone; remember enough to report on time spans.

A server that does not answer is a finding, not an exception: `Probe.read` names what is wrong in the reading.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import SplitResult, urlsplit

from metrics.report import Reading, Report, report_of
from metrics.status import Snapshot

DEFAULT_URL = "http://127.0.0.1:8000"
MAX_BODY_BYTES = 32 * 2**20
TREND_LENGTH = 60
SERVER_STATES = ("starting", "ready", "draining", "failed")
STALL_SECONDS = 10.0


def parse_url(text: str) -> str:
    """The server's root from what people write: a URL, host:port, :port, with or without /v1."""
    written = text.strip()
    if written.isdigit() or (written.startswith(":") and written[1:].isdigit()):
        written = f"127.0.0.1:{written.lstrip(':')}"
    if "://" not in written:
        written = f"http://{written}"
    try:
        parts = urlsplit(written)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; give a URL such as {DEFAULT_URL}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{text!r} is no HTTP address; give a URL such as {DEFAULT_URL}")
    if parts.username is not None:
        raise ValueError(f"credentials in the address of {parts.hostname} are not supported; drop them")
    path = parts.path.rstrip("/")
    for known in ("/v1", "/metrics"):
        path = path.removesuffix(known)
    return SplitResult(parts.scheme, parts.netloc, path, "", "").geturl()


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: str
    headers: Mapping[str, str]

    def json(self) -> dict[str, Any]:
        """The object in the body; empty if there is none."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class NoAnswer(Exception):
    """The server gave no usable answer; the text says why."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Probe:
    """Reads one server. `timeout_seconds` bounds each request as a whole."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self.url = url
        self.timeout_seconds = timeout_seconds
        host = urlsplit(url).hostname or ""
        # A proxy from the environment is meant for other machines.
        local = host in ("localhost", "::1") or host.startswith("127.")
        proxies = urllib.request.ProxyHandler({}) if local else urllib.request.ProxyHandler()
        self._opener = urllib.request.build_opener(proxies)

    def read(self, known: Reading | None = None) -> Reading:
        """Look at the server once. What never changes while it lives is taken from a `known` reading."""
        taken_at, clock = time.time(), time.monotonic()
        try:
            ready, health = self.get("/ready"), self.get("/health")
            scrape = self.get("/metrics")
            if scrape.status != 200:
                raise NoAnswer(f"{self.url}/metrics answers {scrape.status}; is this an xspec server?")
            metrics = _parse(scrape.body, self.url)
            facts = self._facts(metrics, known)
        except NoAnswer as fault:
            return Reading(
                url=self.url, taken_at=taken_at, clock=clock, error=str(fault), timed_out=fault.timed_out
            )
        status = ready.json()
        # A proxy may hide /ready; the metrics know the state too, and a finer one while it starts.
        exported = metrics.info("xspec_server_state").get("state", "starting")
        coarse = exported if exported in SERVER_STATES else "starting"
        told = status.get("state")
        state = told if told in SERVER_STATES else coarse
        phase, detail = str(status.get("phase") or exported), str(status.get("detail") or "")
        error = None
        if state == "failed":
            error = detail or "the engine failed"
        elif health.status == 503 and state != "starting":
            # It would serve, but its engine is silent; it may come back.
            state, error = "stale", detail or "the server says that its engine is not well"
        return replace(
            facts,
            taken_at=taken_at,
            clock=clock,
            state=state,
            phase=phase,
            detail=detail,
            error=error,
            server_time=_date(scrape.headers.get("Date")),
            metrics=metrics,
        )

    def _facts(self, metrics: Snapshot, known: Reading | None) -> Reading:
        """A reading with the version, the model and the configuration, which a server may keep to itself."""
        same = known is not None and known.metrics is not None and not metrics.is_restart_of(known.metrics)
        if known is not None and same and known.state != "starting":
            return known  # a server that starts may not know all of it yet
        models = self._object("/v1/models").get("data")
        card = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        name, longest = card.get("id"), card.get("max_model_len")
        number = self._object("/version").get("version")
        return Reading(
            url=self.url,
            taken_at=0.0,
            clock=0.0,
            model=name if isinstance(name, str) else None,
            max_model_len=longest if isinstance(longest, int) else None,
            version=number if isinstance(number, str) else None,
            server_info=self._object("/server_info") or None,
        )

    def _object(self, path: str) -> dict[str, Any]:
        """The JSON object at a path that is good to know and no more: empty where it is not to be had."""
        try:
            answer = self.get(path)
        except NoAnswer:
            return {}
        return answer.json() if answer.status == 200 else {}

    def get(self, path: str) -> Answer:
        """GET a path; any status is an answer. Raises NoAnswer."""
        deadline = time.monotonic() + self.timeout_seconds
        request = urllib.request.Request(self.url + path, headers={"user-agent": "xspec-status"})
        try:
            try:
                response = self._opener.open(request, timeout=self.timeout_seconds)
            except urllib.error.HTTPError as error:
                response = error
            with response:
                body = self._body(response, deadline)
                return Answer(response.status, body.decode("utf-8", "replace"), dict(response.headers))
        except TimeoutError:
            raise self._silent() from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._silent() from None
            raise NoAnswer(f"{self.url}: {_reason(error.reason)}") from None
        except http.client.HTTPException as error:
            raise NoAnswer(f"{self.url}: the answer is no HTTP ({type(error).__name__})") from None
        except OSError as error:
            raise NoAnswer(f"{self.url}: {_reason(error)}") from None

    def _body(self, response: Any, deadline: float) -> bytes:
        parts: list[bytes] = []
        size = 0
        while part := response.read1(65536):
            parts.append(part)
            size += len(part)
            if time.monotonic() > deadline:
                raise TimeoutError
            if size > MAX_BODY_BYTES:
                raise NoAnswer(f"{self.url}: an answer of more than {MAX_BODY_BYTES} bytes")
        return b"".join(parts)

    def _silent(self) -> NoAnswer:
        message = (
            f"{self.url}: no answer within {self.timeout_seconds:g} s, though something may listen there; "
            "it may be starting"
        )
        return NoAnswer(message, timed_out=True)


def _reason(reason: str | BaseException) -> str:
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused; is a server running there?"
    if isinstance(reason, socket.gaierror):
        return f"the host is not known ({reason.strerror})"
    if isinstance(reason, ConnectionResetError):
        return "the connection was cut"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason)


def _parse(text: str, url: str) -> Snapshot:
    try:
        metrics = Snapshot.parse(text)
    except ValueError as error:
        raise NoAnswer(f"{url}/metrics is no Prometheus text ({error})") from None
    if not metrics.info("xspec_server_state"):
        raise NoAnswer(f"{url}/metrics has no xspec_server_state; is this an xspec server?")
    return metrics


def _date(header: str | None) -> float | None:
    try:
        return None if header is None else email.utils.parsedate_to_datetime(header).timestamp()
    except ValueError:
        return None


class Monitor:
    """Readings of one server over time, as reports on the last `window_seconds`."""

    def __init__(self, read: Callable[[Reading | None], Reading], *, window_seconds: float) -> None:
        self._read = read
        self._window_seconds = window_seconds
        self._good: deque[Reading] = deque()  # of one life of the server, oldest first
        self._trend: deque[float] = deque(maxlen=TREND_LENGTH)
        self._progress: tuple[float, float] | None = None  # (work done, since when)

    def look(self) -> Report:
        """Read the server and report on it."""
        last = self._good[-1] if self._good else None
        reading = self._read(last)
        if reading.metrics is None:
            return self._without_answer(reading, last)
        if last is not None and last.metrics is not None:
            if reading.metrics.is_restart_of(last.metrics):
                self._good.clear()
                self._progress = None
            else:
                self._extend_trend(reading, last)
        while len(self._good) > 1 and reading.clock - self._good[1].clock >= self._window_seconds:
            self._good.popleft()
        earlier = self._good[0] if self._good else None
        self._good.append(reading)
        return report_of(self._judged(reading), earlier=earlier, trend=tuple(self._trend))

    def _without_answer(self, reading: Reading, last: Reading | None) -> Report:
        """A silent server keeps its last figures; one that is gone has none."""
        if last is None:
            return report_of(reading)
        age = reading.clock - last.clock
        if not reading.timed_out:
            return replace(report_of(reading), age_seconds=age)
        earlier = self._good[0] if len(self._good) > 1 else None
        report = report_of(last, earlier=earlier, trend=tuple(self._trend))
        return replace(report, state="stale", error=reading.error, age_seconds=age, taken_at=reading.taken_at)

    def _extend_trend(self, reading: Reading, last: Reading) -> None:
        assert reading.metrics is not None
        assert last.metrics is not None
        name = "xspec_generation_tokens_total"
        elapsed = reading.clock - last.clock
        if elapsed > 0:
            self._trend.append(max(0.0, reading.metrics.sum(name) - last.metrics.sum(name)) / elapsed)

    def _judged(self, reading: Reading) -> Reading:
        """A server that holds requests and does nothing is stale, whatever it says of itself."""
        metrics = reading.metrics
        assert metrics is not None
        work = metrics.sum("xspec_step_tokens_count") + metrics.sum("xspec_generation_tokens_total")
        in_flight = metrics.sum("xspec_requests_in_flight")
        if self._progress is None or work != self._progress[0] or in_flight == 0:
            self._progress = (work, reading.clock)
        idle = reading.clock - self._progress[1]
        if idle < STALL_SECONDS or reading.state not in ("ready", "draining"):
            return reading
        message = f"{in_flight:.0f} requests in flight and no step for {idle:.0f} s"
        return replace(reading, state="stale", error=message)
