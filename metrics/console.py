"""Draw a Report as one screen, or as one line where there is no screen. Pure: report in, text out.

Rows are a label and fields; fields move to the next line where the width ends. Nothing is boxed, so a pipe
gets plain lines, and an encoding without block characters gets ASCII bars.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from metrics.report import Figures, Gauges, Latency, Report
from metrics.wording import age, milliseconds, number, percent, printable, rate, seconds, short

LABEL_WIDTH = 14
GAP = 3
MIN_WIDTH, MAX_WIDTH = 40, 132
WIDE = 106  # from here on latency has columns for the whole life of the server too

_STATE_STYLES = {
    "ready": "bold black on green",
    "starting": "bold black on yellow",
    "draining": "bold black on yellow",
    "stale": "bold black on yellow",
    "failed": "bold white on red",
    "down": "bold white on red",
}
_LATENCIES = (
    ("TTFT", "time_to_first_token"),
    ("TPOT", "time_per_output_token"),
    ("ITL", "inter_token_latency"),
    ("interval", "output_interval"),
    ("duration", "request_duration"),
)
_LATENCY_COLUMNS = ("p50", "p95", "p99", "mean", "count")

Field = Text | str


@dataclass(frozen=True, slots=True)
class Glyphs:
    full: str
    empty: str
    levels: str  # lowest to highest


UNICODE = Glyphs("█", "░", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", ".", "._-=+*%#")


def render(report: Report, *, max_height: int | None = None) -> RenderableType:
    """The screen of a report; it fits itself to the width of the console, and leaves rows out to be no higher."""
    return _Screen(report, max_height)


@dataclass(frozen=True, slots=True)
class _Screen:
    report: Report
    max_height: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(MIN_WIDTH, min(options.max_width, MAX_WIDTH))
        painter = _Painter(width, ASCII if options.ascii_only else UNICODE)
        lines = list(painter.screen(self.report))
        if self.max_height is not None and len(lines) > self.max_height:
            lines = list(painter.short_screen(self.report))
        yield from lines


class _Painter:
    """Turns a report into lines of at most `width` cells."""

    def __init__(self, width: int, glyphs: Glyphs) -> None:
        self.width = width
        self.glyphs = glyphs
        self.bar_width = max(10, min(30, width // 4))

    def screen(self, report: Report) -> Iterator[Text]:
        yield from self.head(report)
        now, figures = report.now, report.figures
        if now is None or figures is None or report.state == "starting":
            return
        yield Text()
        yield from self.traffic(report, now, figures)
        yield from self.since_start(report.total or figures)
        yield from self.pages(now)
        yield Text()
        yield from self.latency(report, figures, _LATENCIES)
        yield Text()
        yield from self.speculation(figures)
        yield from self.budget(now, figures)
        yield from self.decisions(figures)
        yield from self.steps(now, figures)

    def short_screen(self, report: Report) -> Iterator[Text]:
        """What matters most, for a terminal that is too low for all of it."""
        yield from self.head(report)
        now, figures = report.now, report.figures
        if now is None or figures is None or report.state == "starting":
            return
        yield from self.traffic(report, now, figures)
        yield from self.pages(now)
        yield from self.latency(report, figures, _LATENCIES[:3])
        yield from self.speculation(figures)
        yield from self.budget(now, figures)
        yield from self.steps(now, figures)

    def row(self, label: str | Text, fields: Sequence[Field], *, style: str = "") -> Iterator[Text]:
        """A label and fields; a field that does not fit begins a line, and is cut where it fills one."""
        line = label if isinstance(label, Text) else Text(label.ljust(LABEL_WIDTH), style="dim")
        is_empty = True
        for field in fields:
            text = field if isinstance(field, Text) else Text(printable(field), style=style)
            gap = 0 if is_empty else GAP
            if not is_empty and line.cell_len + gap + text.cell_len > self.width:
                yield self.fitted(line)
                line, gap = Text(" " * LABEL_WIDTH), 0
            line = Text.assemble(line, " " * gap, text)
            is_empty = False
        yield self.fitted(line)

    def fitted(self, line: Text) -> Text:
        line.no_wrap = True
        line.rstrip()
        line.truncate(self.width, overflow="crop" if self.glyphs is ASCII else "ellipsis")
        return line

    def words(self, label: str, message: str, *, style: str) -> Iterator[Text]:
        """A message of any length, broken between words."""
        width = self.width - LABEL_WIDTH
        lines: list[str] = []
        for word in printable(message).split():
            if lines and len(lines[-1]) + 1 + len(word) <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
        for index, text in enumerate(lines):
            yield from self.row(label if index == 0 else "", [Text(text, style=style)])

    def bar(self, ratio: float | None, style: str) -> Text:
        filled = round(self.bar_width * min(1.0, max(0.0, ratio or 0.0)))
        return Text.assemble(
            (self.glyphs.full * filled, style), (self.glyphs.empty * (self.bar_width - filled), "dim")
        )

    def level(self, ratio: float) -> str:
        levels = self.glyphs.levels
        return levels[min(len(levels) - 1, max(0, int(ratio * len(levels))))]

    def head(self, report: Report) -> Iterator[Text]:
        state = Text(
            f" {report.state.upper()} ".ljust(LABEL_WIDTH), style=_STATE_STYLES.get(report.state, "bold")
        )
        program = " ".join(["xspec", *filter(None, (report.version,))])
        if report.device:
            program += f" on {report.device}"
        fields: list[Field] = [Text(printable(report.url), style="bold"), program]
        if report.uptime_seconds is not None:
            fields.append(f"up {age(report.uptime_seconds)}")
        yield from self.row(state, fields)
        if report.error:
            yield from self.words("error", report.error, style="bold red")
        if report.error and report.age_seconds >= 1:
            known = "the figures below are as old" if report.now is not None else "it has gone since"
            yield from self.row("last answer", [f"{age(report.age_seconds)} ago; {known}"])
        if report.state == "starting" or (report.detail and report.state == "draining"):
            yield from self.words("phase", f"{report.phase} {report.detail}".strip() or "-", style="yellow")
        if report.model is not None:
            yield from self.row("model", [Text(printable(report.model), style="bold"), *_setup(report)])

    def traffic(self, report: Report, now: Gauges, figures: Figures) -> Iterator[Text]:
        if report.window is not None:
            over = f"over {seconds(figures.seconds)}"
        else:
            over = "average since it was ready" if figures.seconds is not None else "average unknown"
        throughput: list[Field] = [
            f"{rate(figures.generation_tokens_per_second)} tokens/s",
            f"{rate(figures.requests_per_second)} requests/s",
            f"{rate(figures.prefill_tokens_per_second)} prompt rows/s",
            Text(over, style="dim"),
        ]
        if report.trend:
            throughput.insert(1, Text(self.sparkline(report.trend), style="cyan"))
        yield from self.row("throughput", throughput)
        waiting = Text(f"{now.waiting:,} waiting", style="yellow" if now.waiting else "")
        requests: list[Field] = [f"{now.running:,} running", waiting, f"{now.in_flight:,} in flight"]
        yield from self.row("requests", requests)

    def since_start(self, total: Figures) -> Iterator[Text]:
        done: list[Field] = [
            f"{total.generation_tokens:,} tokens generated",
            f"{total.prompt_tokens:,} prompt tokens ({total.cached_prompt_tokens:,} cached)",
            f"finished {_named(total.finished)}",
        ]
        if any(total.rejected.values()):
            done.append(Text(f"refused {_named(total.rejected)}", style="yellow"))
        if total.preemptions:
            done.append(Text(f"{total.preemptions:,} preemptions", style="yellow"))
        yield from self.row("since start", done)

    def pages(self, now: Gauges) -> Iterator[Text]:
        style = "red" if (now.pages_used_ratio or 0) >= 0.95 else "green"
        pages: list[Field] = [
            self.bar(now.pages_used_ratio, style),
            f"{percent(now.pages_used_ratio)}",
            f"{now.pages_used:,} used",
            f"{now.pages_cached:,} cached",
            f"{now.pages_free:,} free",
        ]
        yield from self.row("KV pages", pages)
        if now.metrics_anomalies:
            yield from self.row(
                "metrics", [f"{now.metrics_anomalies:,} anomalies: a bug in xspec"], style="red"
            )

    def sparkline(self, values: Sequence[float]) -> str:
        shown = values[-self.bar_width :]
        top = max(shown)
        return "".join(self.level(value / top if top > 0 else 0.0) for value in shown)

    def latency(self, report: Report, figures: Figures, rows: Sequence[tuple[str, str]]) -> Iterator[Text]:
        """Quantiles over the window; on a wide screen beside those since the start."""
        both = report.window is not None and report.total is not None and self.width >= WIDE
        columns = [figures, report.total] if both and report.total is not None else [figures]
        heads = [Text(_columns(_LATENCY_COLUMNS), style="dim") for _ in columns]
        if both:
            spans = (f"over {seconds(figures.seconds)}", "since the start")
            yield from self.row("latency", [Text(t.rjust(len(heads[0])), style="dim") for t in spans])
        yield from self.row("" if both else "latency", heads)
        for label, name in rows:
            yield from self.row(label, [_latency_cells(getattr(column, name)) for column in columns])

    def speculation(self, figures: Figures) -> Iterator[Text]:
        spec = figures.speculation
        if spec.sequence_steps == 0:
            yield from self.row("speculation", [Text("no decode step yet", style="dim")])
            return
        share = f"{spec.verified:,} of {spec.proposed:,} proposed"
        fields: list[Field] = [
            Text(f"acceptance length {number(spec.acceptance_length)}", style="bold"),
            f"verified {percent(spec.verified_ratio)} ({share})",
            f"accepted {percent(spec.accepted_ratio)} of verified",
            f"plain steps {spec.plain_sequence_steps:,}",
            f"truncated {spec.truncated:,}",
            f"discarded {spec.discarded:,}",
        ]
        yield from self.row("speculation", fields)
        per_line = max(1, (self.width - LABEL_WIDTH + 1) // 6)
        for start in range(0, len(spec.positions), per_line):
            positions = spec.positions[start : start + per_line]
            yield self.strip("position", [Text(str(p.position).rjust(5)) for p in positions])
            yield self.strip("conditional", [self.acceptance(p.conditional) for p in positions])
            yield self.strip("cumulative", [self.acceptance(p.cumulative) for p in positions])
            yield self.strip("verified", [Text(short(p.verified).rjust(5), style="dim") for p in positions])

    def strip(self, label: str, cells: Sequence[Text]) -> Text:
        head = Text((" " + label).ljust(LABEL_WIDTH), style="dim")
        return self.fitted(Text.assemble(head, Text(" ").join(cells)))

    def acceptance(self, ratio: float | None) -> Text:
        if ratio is None:
            return Text("-".rjust(5), style="dim")
        style = "green" if ratio >= 0.7 else "yellow" if ratio >= 0.4 else "red"
        return Text.assemble((self.level(ratio), style), f"{100 * ratio:.0f}%".rjust(4))

    def budget(self, now: Gauges, figures: Figures) -> Iterator[Text]:
        budget = figures.budget
        if budget.steps == 0:
            return
        rows = f"{number(budget.rows_per_step)} of {number(budget.full_width_rows_per_step)} rows a step"
        fields: list[Field] = [
            self.bar(budget.full_width_ratio, "cyan"),
            f"{percent(budget.full_width_ratio)} of full width",
            rows,
            f"newest {now.budget_rows:,}",
        ]
        yield from self.row("budget", fields)

    def decisions(self, figures: Figures) -> Iterator[Text]:
        budget = figures.budget
        if budget.steps == 0:
            return
        fallbacks = sum(budget.fallbacks.values())
        decided: list[Field] = [_named(budget.decisions)]
        if fallbacks:
            decided.append(Text(f"fallbacks {_named(budget.fallbacks)}", style="yellow"))
        else:
            decided.append("fallbacks 0")
        yield from self.row("decisions", decided)

    def steps(self, now: Gauges, figures: Figures) -> Iterator[Text]:
        steps = figures.steps
        if steps.count == 0:
            return
        fields: list[Field] = []
        if steps.prediction_bias is not None:
            off = abs(steps.prediction_bias) > 0.1
            predicted = (
                f"predicted {seconds(steps.predicted_mean_seconds)}, "
                f"measured {seconds(steps.measured_mean_seconds)} ({100 * steps.prediction_bias:+.1f}%)"
            )
            fields.append(Text(predicted, style="yellow" if off else "green"))
            p50, p95 = percent(steps.prediction_error_p50), percent(steps.prediction_error_p95)
            fields.append(f"error p50 {p50} p95 {p95}")
        else:
            fields.append(f"{seconds(steps.total_mean_seconds)} mean")
        fields += [f"host {seconds(steps.schedule_mean_seconds)}", f"{steps.count:,} steps"]
        if now.expected_speedup is not None:
            fields.append(f"predicted gain {now.expected_speedup:.2f}x over plain")
        yield from self.row("step time", fields)


def _setup(report: Report) -> Iterator[str]:
    if (report.draft_method or "none") == "none" and report.policy == "off":
        yield "no draft"
    elif report.draft_method is not None:
        drafts = "" if report.max_draft_tokens is None else f", {report.max_draft_tokens} drafts"
        yield f"{report.draft_method}{drafts}, {report.policy or '-'}"
    if report.max_model_len is not None:
        yield f"up to {report.max_model_len:,} tokens"


def _columns(cells: Sequence[str]) -> str:
    return " ".join(cell.rjust(8) for cell in cells)


def _latency_cells(latency: Latency) -> Text:
    if latency.count == 0:
        return Text(_columns(["-"] * 4 + ["0"]), style="dim")
    times = (latency.p50_seconds, latency.p95_seconds, latency.p99_seconds, latency.mean_seconds)
    return Text(_columns([*map(seconds, times), short(latency.count)]))


def _named(counts: Mapping[str, int]) -> str:
    """Counts by name, those of 0 left out."""
    return printable(", ".join(f"{count:,} {name}" for name, count in counts.items() if count)) or "0"


def line(report: Report) -> str:
    """The report as one line of key=value, for pipes and terminals that cannot redraw."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(report.taken_at))
    parts = [stamp, f"state={report.state}"]
    now, figures = report.now, report.figures
    if report.state == "starting":
        parts.append(f'phase={report.phase or "-"} detail="{printable(report.detail)}"')
    elif now is not None and figures is not None:
        ttft, itl, spec = figures.time_to_first_token, figures.inter_token_latency, figures.speculation
        steps = figures.steps
        parts += [
            f"tokens_per_s={rate(figures.generation_tokens_per_second)}",
            f"requests_per_s={rate(figures.requests_per_second)}",
            f"running={now.running}",
            f"waiting={now.waiting}",
            f"kv_used={percent(now.pages_used_ratio)}",
            f"ttft_p50_ms={milliseconds(ttft.p50_seconds)}",
            f"ttft_p95_ms={milliseconds(ttft.p95_seconds)}",
            f"tpot_p50_ms={milliseconds(figures.time_per_output_token.p50_seconds)}",
            f"itl_p50_ms={milliseconds(itl.p50_seconds)}",
            f"itl_p95_ms={milliseconds(itl.p95_seconds)}",
            f"acceptance_length={number(spec.acceptance_length)}",
            f"verified={percent(spec.verified_ratio)}",
            f"budget={percent(figures.budget.full_width_ratio)}",
            f"step_predicted_ms={milliseconds(steps.predicted_mean_seconds)}",
            f"step_measured_ms={milliseconds(steps.measured_mean_seconds)}",
            f"fallbacks={sum(figures.budget.fallbacks.values())}",
            f"discarded={spec.discarded}",
        ]
    if report.error:
        parts += [f"age_s={report.age_seconds:.0f}"] if report.age_seconds else []
        parts.append(f'error="{printable(report.error)}"')
    return " ".join(parts)
