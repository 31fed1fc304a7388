"""Commands that show a feed: ui (a web page), report (the page as one file), watch (the terminal), status."""

import argparse
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from deltasync.cli.feeds import feed_size_text, stored
from deltasync.cli.output import Column, Output, shortened
from deltasync.cli.service import calling_on_signal, run_until_signal
from deltasync.cli.units import count_text, duration_text, or_dash, ratio_text, share_text, size_text
from deltasync.errors import DeltasyncError, MismatchError, StoreError, printable
from deltasync.feed.log import Log
from deltasync.files import atomic_write, require_replaceable
from deltasync.replica.events import ReplicaState, replica_states
from deltasync.store import opened
from deltasync.ui.alerts import Alert, alerts
from deltasync.ui.overview import Overview, Replica, Watch
from deltasync.ui.page import POLL_S, Page, feed_json, is_report, serving
from deltasync.ui.page import report as write_report

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {"critical": "bold red", "warning": "yellow", "notice": "cyan"}
_BARS = "▁▂▃▄▅▆▇█"
_LEAST_ROWS = 5


def ui(args: argparse.Namespace, out: Output) -> None:
    """Serve the page until SIGINT or SIGTERM; its address is printed to stderr."""
    token = os.environ.get("DELTASYNC_TOKEN") or None
    with opened(args.url) as store:
        # A mistyped URL must not look as if there were nothing yet.
        Log(store).require_head()
        page = Page(store, token=token)
        # Before the address is printed: from then on a signal ends it as it should.
        with calling_on_signal(page.stop), serving(page, *args.listen, has_token=token is not None) as url:
            hint = "; it asks for DELTASYNC_TOKEN" if token else ""
            text = json.dumps({"listening": url}) if out.is_json else f"open {url}/ in a browser{hint}"
            print(text, file=sys.stderr, flush=True)
            page.run()


def report(args: argparse.Namespace, out: Output) -> None:
    """Write the report, and print what it shows."""
    require_replaceable(args.output, is_report, what="a report")
    with opened(args.url) as store:
        html, overview = write_report(store)
    content = html.encode()
    atomic_write(args.output, [content])
    found = alerts(overview)
    if out.is_json:
        summary = [alert.to_json() for alert in found]
        out.json({"output": str(args.output), "bytes": len(content), "head": _head(overview), "alerts": summary})
        return
    out.line(
        f"{args.output}: {size_text(len(content))}, up to version {_head(overview)}, {count_text(len(found), 'alert')}"
    )


def watch(args: argparse.Namespace, out: Output) -> None:
    """Show a feed once, or continuously: on a terminal in place, otherwise a line for each change."""
    stopped = threading.Event()
    with opened(args.url) as store:
        watched = Watch(store)
        # A mistyped URL must not look as if there were nothing yet.
        watched.log.require_head()
        if args.once:
            _print(out, watched.refresh())
            return
        show = _watch_terminal if out.columns is not None and not out.is_json else _watch_lines
        run_until_signal(lambda: show(out, watched, stopped), stopped.set)


def _watch_terminal(out: Output, watched: Watch, stopped: threading.Event) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(no_color=not out.has_colours, highlight=False)
    overview: Overview | None = None
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not stopped.is_set():
            overview, error = _refreshed(watched, overview)
            if overview is not None:
                live.update(_screen(overview, error, console.width, console.height), refresh=True)
            stopped.wait(POLL_S)


def _refreshed(watched: Watch, before: Overview | None) -> tuple[Overview | None, DeltasyncError | None]:
    """The feed now; the one before with the error, if it cannot be read."""
    try:
        return watched.refresh(), None
    except DeltasyncError as error:
        if before is None and not isinstance(error, StoreError):
            raise
        return before, error


def _watch_lines(out: Output, watched: Watch, stopped: threading.Event) -> None:
    """Print a line for each new version, replica that moved, and alert that is new or gone."""
    before: dict[str, Any] = {}
    overview: Overview | None = None
    while not stopped.is_set():
        overview, error = _refreshed(watched, overview)
        now = {} if overview is None else _facts(overview)
        if error is not None:
            now["store"] = {"event": "unreadable", "message": str(error)}
        for key, fact in now.items():
            if before.get(key) != fact:
                _print_fact(out, fact)
        for key in before.keys() - now.keys():
            if before[key]["event"] in ("alert", "unreadable"):
                _print_fact(out, {**before[key], "event": "over"})
        before = now
        stopped.wait(POLL_S)


def _facts(overview: Overview) -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = {}
    if overview.head is not None:
        m = overview.head
        change = {"bytes": m.nbytes, "changed": m.changed, "elements": m.elements}
        facts["head"] = {"event": "head", "version": m.version, "step": m.step, **change}
    for r in overview.replicas:
        state = r.state
        facts[f"replica {state.id}"] = {
            "event": "replica",
            "id": state.id,
            "version": state.version,
            "live": state.is_live,
            "digest_equal": state.has_digest,
        }
    for alert in alerts(overview):
        # Not by its message: the numbers in it change.
        subject = alert.message.partition(" is ")[0].partition(":")[0]
        facts[f"{alert.kind} {subject}"] = {
            "event": "alert",
            "level": alert.level,
            "kind": alert.kind,
            "subject": subject,
        }
    return facts


def _print_fact(out: Output, fact: dict[str, Any]) -> None:
    if out.is_json:
        out.json_line(fact)
        return
    print("\t".join(printable(or_dash(value)) for value in fact.values()), flush=True)


def _print(out: Output, overview: Overview) -> None:
    if out.is_json:
        out.json(feed_json(overview))
        return
    if out.columns is not None:
        from rich.console import Console

        Console(no_color=not out.has_colours, highlight=False).print(_screen(overview, None, out.columns, None))
        return
    for name, value in _summary(overview):
        print(f"{name}\t{printable(value)}")
    for alert in alerts(overview):
        print(f"{alert.level}\t{printable(alert.message)}")
    for r in overview.replicas:
        print("\t".join(("replica", *(printable(text) for text in _replica_row(r)))))


def _head(overview: Overview) -> str:
    return "-" if overview.head is None else str(overview.head.version)


def _summary(overview: Overview) -> list[tuple[str, str]]:
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


def _replica_row(r: Replica) -> tuple[str, ...]:
    state = r.state
    behind = "-" if state.lag is None else f"{state.lag:,}"
    if r.lag_s:
        behind += f" ({duration_text(r.lag_s)})"
    bits = "unknown" if state.has_digest is None else "equal" if state.has_digest else "DIFFERENT"
    beat = duration_text(max(1, state.age_s))
    total_s = sum(value for phase, value in state.seconds.items() if phase != "pause")
    return (state.id, or_dash(state.version), behind, beat, bits, duration_text(total_s) if state.seconds else "-")


def _sparkline(values: list[int], width: int) -> str:
    shown = values[-width:]
    most = max(shown, default=0)
    return "".join(_BARS[min(7, 8 * value // most)] if most else _BARS[0] for value in shown)


def _screen(overview: Overview, error: DeltasyncError | None, columns: int, rows: int | None) -> "RenderableType":
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
    deltas = [m.nbytes for m in overview.versions if m.kind == "delta"]
    grid.add_row(Text("bytes", style="dim"), Text(_sparkline(deltas, columns - 14), style="blue"))
    parts.append(grid)
    found = alerts(overview)
    room = _LEAST_ROWS if rows is None else max(1, (rows - 12) // 3)
    parts.extend(_alert_text(alert, columns) for alert in found[:room])
    if len(found) > room:
        parts.append(Text(f"{len(found) - room} more alerts", style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, justify in (
        ("replica", "left"),
        ("version", "right"),
        ("behind", "right"),
        ("beat", "right"),
        ("bits", "left"),
        ("move", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    left = len(overview.replicas) if rows is None else max(_LEAST_ROWS, rows - 11 - min(room, len(found)))
    name_columns = max(8, columns - 58)
    for r in overview.replicas[:left]:
        cells = _replica_row(r)
        style = "red" if r.state.has_digest is False else "dim" if not r.state.is_live else ""
        table.add_row(
            *(
                Text(shortened(printable(text), name_columns if i == 0 else 18), style=style)
                for i, text in enumerate(cells)
            )
        )
    live = sum(r.state.is_live for r in overview.replicas)
    parts.append(
        Text(
            f"{count_text(live, 'live replica')}, {len(overview.replicas) - live + overview.older_replicas} silent",
            style="dim",
        )
    )
    if overview.replicas:
        parts.append(table)
    if len(overview.replicas) > left:
        parts.append(
            Text(
                f"{len(overview.replicas) - left} more replicas: in a higher terminal, or with --once --plain",
                style="dim",
            )
        )
    return Group(*parts)


def _alert_text(alert: Alert, columns: int) -> Any:
    from rich.text import Text

    return Text(shortened(f"{alert.level}: {printable(alert.message)}", columns), style=_STYLES[alert.level])


_COLUMNS = (
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


def status(args: argparse.Namespace, out: Output) -> None:
    """List the replicas; an error if a live one has other bits than its version."""
    with opened(args.url) as store:
        log = Log(store)
        head = log.require_head()
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
        out.table(title, _COLUMNS, [_row(state) for state in states], alarming=alarming)
    sys.stdout.flush()
    wrong = [state.id for state in states if state.is_live and state.has_digest is False]
    if wrong:
        raise MismatchError(
            f"{args.url}: {count_text(len(wrong), 'replica')} with another digest than that of the version served, "
            f"or with a version that the feed does not have, such as {wrong[0]!r:.140}",
            hint="scrub or restart them; `deltasync verify` checks the feed itself",
        )


def _row(state: ReplicaState) -> tuple[Any, ...]:
    proved_s = state.proved_age_s
    return (
        state.id,
        state.version,
        state.lag,
        state.age_s,
        "live" if state.is_live else "silent",
        "unknown" if state.has_digest is None else "equal" if state.has_digest else "DIFFERENT",
        None if proved_s is None else f"{state.proved_version}, {duration_text(proved_s)} ago",
        state.engine,
        ", ".join(f"{phase} {duration_text(value)}" for phase, value in state.seconds.items()) or None,
    )
