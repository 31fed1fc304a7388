"""Commands that show a feed: ui (a web page), report (the page as one file), watch (the terminal), status."""

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltasync.cli.feeds import feed_size_text, opened_feed, stored
from deltasync.cli.output import (
    Column,
    Output,
    count_text,
    duration_text,
    or_dash,
    ratio_text,
    share_text,
    shortened,
    size_text,
)
from deltasync.cli.parser import Parser, address
from deltasync.cli.service import calling_on_signal, run_until_signal
from deltasync.errors import DeltasyncError, MismatchError, StoreError, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltasync.replica.events import ReplicaState
    from deltasync.ui.overview import Overview, Watch

_STYLES = {"critical": "bold red", "warning": "yellow", "notice": "cyan"}
_BARS = "▁▂▃▄▅▆▇█"
_LEAST_ROWS = 5


def ui_arguments(parser: Parser) -> None:
    parser.explain(
        "It goes on until SIGINT or SIGTERM. It reads the feed, and never writes.",
        example="deltasync ui s3://bucket/run-42",
    )
    parser.add_url()
    parser.add_argument(
        "--listen",
        type=address,
        default=("127.0.0.1", 8642),
        metavar="HOST:PORT",
        help="where to serve it (default: 127.0.0.1:8642); other addresses than loopback need DELTASYNC_TOKEN",
    )


def ui(args: argparse.Namespace, out: Output) -> None:
    """Serve the page until SIGINT or SIGTERM; its address is printed to stderr."""
    from deltasync.listener import listening
    from deltasync.ui.page import Page

    token = os.environ.get("DELTASYNC_TOKEN") or None
    with opened_feed(args.url) as (log, _):
        page = Page(log.store, token=token)
        # Before the address is printed: from then on a signal ends it as it should.
        with calling_on_signal(page.stop), listening(page.respond, *args.listen, has_token=token is not None) as url:
            hint = "; it asks for DELTASYNC_TOKEN" if token else ""
            text = json.dumps({"listening": url}) if out.is_json else f"open {url}/ in a browser{hint}"
            print(text, file=sys.stderr, flush=True)
            page.run()


def report_arguments(parser: Parser) -> None:
    parser.explain(
        "The file has all it needs inside: it opens anywhere, and makes no request.",
        example="deltasync report s3://bucket/run-42 -o report.html",
    )
    parser.add_url()
    parser.add_argument("-o", "--output", metavar="FILE", required=True, type=Path, help="file to write")


def report(args: argparse.Namespace, out: Output) -> None:
    """Write the report, and print what it shows."""
    from deltasync.files import atomic_write, require_replaceable
    from deltasync.store import opened
    from deltasync.ui.page import is_report
    from deltasync.ui.page import report as write_report

    require_replaceable(args.output, is_report, what="a report")
    with opened(args.url) as store:
        html, overview = write_report(store)
    content = html.encode()
    atomic_write(args.output, [content])
    found = overview.alerts()
    if out.is_json:
        summary = [asdict(alert) for alert in found]
        out.json({"output": str(args.output), "bytes": len(content), "head": _head(overview), "alerts": summary})
        return
    out.line(
        f"{args.output}: {size_text(len(content))}, up to version {_head(overview)}, {count_text(len(found), 'alert')}"
    )


def watch_arguments(parser: Parser) -> None:
    parser.explain(
        "It goes on until SIGINT or SIGTERM. It reads the feed, and never writes.",
        example="deltasync watch s3://bucket/run-42",
    )
    parser.add_url()
    parser.add_argument("--once", action="store_true", help="print it once, then exit")


def watch(args: argparse.Namespace, out: Output) -> None:
    """Show a feed once, or continuously: on a terminal in place, otherwise a line for each change."""
    from deltasync.ui.overview import Watch
    from deltasync.ui.page import feed_json

    stopped = threading.Event()
    with opened_feed(args.url) as (log, _):
        watched = Watch(log.store)
        if not args.once:
            is_screen = out.columns is not None and not out.is_json
            show = _watch_terminal if is_screen else _watch_lines
            run_until_signal(lambda: show(out, watched, stopped), stopped.set)
            return
        overview = watched.refresh()
    if out.is_json:
        out.json(feed_json(overview))
    elif out.columns is not None:
        from rich.console import Console

        Console(no_color=not out.has_colours, highlight=False).print(_screen(overview, None, out.columns, None))
    else:
        for name, value in _summary(overview):
            print(f"{name}\t{printable(value)}")
        for alert in overview.alerts():
            print(f"{alert.level}\t{printable(alert.message)}")
        for state, lag_s in overview.replicas:
            print("\t".join(("replica", *(printable(text) for text in _replica_row(state, lag_s)))))


def _watch_terminal(out: Output, watched: "Watch", stopped: threading.Event) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(no_color=not out.has_colours, highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for overview, error in _polled(watched, stopped):
            if overview is not None:
                live.update(_screen(overview, error, console.width, console.height), refresh=True)


def _watch_lines(out: Output, watched: "Watch", stopped: threading.Event) -> None:
    """Print a line for each new version, replica that moved, and alert that is new or gone."""
    before: dict[str, Any] = {}
    for overview, error in _polled(watched, stopped):
        now = {} if overview is None else _facts(overview)
        if error is not None:
            now["store"] = {"event": "unreadable", "message": str(error)}
        new = [fact for key, fact in now.items() if before.get(key) != fact]
        gone = [before[key] for key in before.keys() - now.keys() if before[key]["event"] in ("alert", "unreadable")]
        for fact in (*new, *({**fact, "event": "over"} for fact in gone)):
            if out.is_json:
                out.json_line(fact)
            else:
                print("\t".join(printable(or_dash(value)) for value in fact.values()), flush=True)
        before = now


def _polled(watched: "Watch", stopped: threading.Event) -> Iterator[tuple["Overview | None", DeltasyncError | None]]:
    """The feed again and again, until it is stopped: as it is now, or as it was before with the error of reading it."""
    from deltasync.ui.page import POLL_S

    overview: Overview | None = None
    while not stopped.is_set():
        failure = None
        try:
            overview = watched.refresh()
        except DeltasyncError as error:
            if overview is None and not isinstance(error, StoreError):
                raise
            failure = error
        yield overview, failure
        stopped.wait(POLL_S)


def _facts(overview: "Overview") -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = {}
    if overview.head is not None:
        m = overview.head
        change = {"bytes": m.nbytes, "changed": m.changed, "elements": m.elements}
        facts["head"] = {"event": "head", "version": m.version, "step": m.step, **change}
    for state, _ in overview.replicas:
        facts[f"replica {state.id}"] = {
            "event": "replica",
            "id": state.id,
            "version": state.version,
            "live": state.is_live,
            "digest_equal": state.has_digest,
        }
    for alert in overview.alerts():
        # Not by its message: the numbers in it change.
        subject = alert.message.partition(" is ")[0].partition(":")[0]
        named = {"event": "alert", "level": alert.level, "kind": alert.kind, "subject": subject}
        facts[f"{alert.kind} {subject}"] = named
    return facts


def _head(overview: "Overview") -> str:
    return "-" if overview.head is None else str(overview.head.version)


def _summary(overview: "Overview") -> list[tuple[str, str]]:
    head, pace = overview.head, overview.versions_per_minute
    if head is None:
        return [("head", "no version yet")]
    age = duration_text(round(overview.age_s or 0))
    step = "" if head.step is None else f", step {head.step:,}"
    rows = [
        ("head", f"version {head.version:,}{step}, {age} ago" + ("" if pace is None else f"; {pace:.3g} per minute"))
    ]
    if overview.delta_bytes is not None:
        mean = size_text(round(overview.delta_bytes))
        full = overview.full_bytes
        rows.append(
            ("per version", mean + ("" if full is None else f", {ratio_text(round(overview.delta_bytes), full)}"))
        )
    if head.changed is not None:
        rows.append(("changed", f"{head.changed:,} elements ({share_text(head.changed, head.elements)}) in the newest"))
    rows.append(("stored", feed_size_text(overview.stored_payloads, overview.stored_bytes)))
    return rows


def _bits_text(state: "ReplicaState") -> str:
    return "unknown" if state.has_digest is None else "equal" if state.has_digest else "DIFFERENT"


def _replica_row(state: "ReplicaState", lag_s: int | None) -> tuple[str, ...]:
    behind = "-" if state.lag is None else f"{state.lag:,}"
    if lag_s:
        behind += f" ({duration_text(lag_s)})"
    beat = duration_text(max(1, state.age_s))
    total_s = sum(value for phase, value in state.seconds.items() if phase != "pause")
    return (
        state.id,
        or_dash(state.version),
        behind,
        beat,
        _bits_text(state),
        duration_text(total_s) if state.seconds else "-",
    )


def _screen(overview: "Overview", error: DeltasyncError | None, columns: int, rows: int | None) -> "RenderableType":
    """The whole screen, which fits `columns`, and `rows` if there is a limit. All text is escaped."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(shortened(printable(overview.url), columns), style="bold")]
    if error is not None:
        parts.append(Text(shortened(f"cannot be read: {printable(str(error))}", columns), style=_STYLES["critical"]))
    grid = Table.grid(padding=(0, 2))
    for name, value in _summary(overview):
        grid.add_row(Text(name, style="dim"), Text(shortened(printable(value), columns - 14)))
    deltas = [m.nbytes for m in overview.versions if m.kind == "delta"][-(columns - 14) :]
    most = max(deltas, default=0)
    bars = "".join(_BARS[min(7, 8 * value // most)] if most else _BARS[0] for value in deltas)
    grid.add_row(Text("bytes", style="dim"), Text(bars, style="blue"))
    parts.append(grid)
    found = overview.alerts()
    room = _LEAST_ROWS if rows is None else max(1, (rows - 12) // 3)
    for alert in found[:room]:
        text = shortened(f"{alert.level}: {printable(alert.message)}", columns)
        parts.append(Text(text, style=_STYLES[alert.level]))
    if len(found) > room:
        parts.append(Text(f"{len(found) - room} more alerts", style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("replica", "version", "behind", "beat", "bits", "move"):
        table.add_column(name, justify="left" if name in ("replica", "bits") else "right", no_wrap=True)
    left = len(overview.replicas) if rows is None else max(_LEAST_ROWS, rows - 11 - min(room, len(found)))
    name_columns = max(8, columns - 58)
    for state, lag_s in overview.replicas[:left]:
        cells = _replica_row(state, lag_s)
        style = "red" if state.has_digest is False else "dim" if not state.is_live else ""
        widths = (name_columns, *[18] * (len(cells) - 1))
        texts = (shortened(printable(text), width) for text, width in zip(cells, widths, strict=True))
        table.add_row(*(Text(text, style=style) for text in texts))
    live = sum(state.is_live for state, _ in overview.replicas)
    silent = len(overview.replicas) - live + overview.older_replicas
    parts.append(Text(f"{count_text(live, 'live replica')}, {silent} silent", style="dim"))
    if overview.replicas:
        parts.append(table)
    if len(overview.replicas) > left:
        more = f"{len(overview.replicas) - left} more replicas: in a higher terminal, or with --once --plain"
        parts.append(Text(more, style="dim"))
    return Group(*parts)


def status_arguments(parser: Parser) -> None:
    parser.explain(
        "Exits with 3 if a live replica has other bits than its version.",
        example="deltasync status s3://bucket/run-42",
    )
    parser.add_url()


def status(args: argparse.Namespace, out: Output) -> None:
    """List the replicas; an error if a live one has other bits than its version."""
    from deltasync.replica.events import replica_states

    with opened_feed(args.url) as (log, head):
        floor = log.floor()
        states = replica_states(log, head)
        payloads, stored_bytes = stored(log)
    if out.is_json:
        sizes = {"stored_bytes": stored_bytes, "stored_payloads": payloads}
        replicas = [state.to_json() for state in states]
        out.json({"head": head.version, "floor": floor, **sizes, "replicas": replicas})
    else:
        live = sum(state.is_live for state in states)
        title = f"version {head.version} is the newest" + (f", pruned before version {floor}" if floor else "")
        title += f"; {count_text(live, 'live replica')}, {len(states) - live} silent"
        title += f"; {feed_size_text(payloads, stored_bytes)}"
        alarming = [i for i, state in enumerate(states) if state.has_digest is False]
        columns = (
            Column("replica", is_name=True),
            Column("version"),
            Column("lag"),
            Column("age", duration_text),
            Column("state", is_name=True),
            Column("digest", is_name=True),
            Column("proved", rank=2),
            Column("engine", is_name=True, rank=1),
            Column("last move", is_name=True, rank=3),
        )
        rows = [
            (
                state.id,
                state.version,
                state.lag,
                state.age_s,
                "live" if state.is_live else "silent",
                _bits_text(state),
                None
                if state.proved_age_s is None
                else f"{state.proved_version}, {duration_text(state.proved_age_s)} ago",
                state.engine,
                ", ".join(f"{phase} {duration_text(value)}" for phase, value in state.seconds.items()) or None,
            )
            for state in states
        ]
        out.table(title, columns, rows, alarming=alarming)
    sys.stdout.flush()
    wrong = [state.id for state in states if state.is_live and state.has_digest is False]
    if wrong:
        raise MismatchError(
            f"{args.url}: {count_text(len(wrong), 'replica')} with another digest than that of the version served, "
            f"or with a version that the feed does not have, such as {wrong[0]!r:.140}",
            hint="scrub or restart them; `deltasync verify` checks the feed itself",
        )
