"""The `plan` command: what a feed would cost, estimated from measured rates."""

import argparse
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from deltasync.cli.output import (
    Column,
    Output,
    bits_text,
    count_text,
    duration_text,
    number_text,
    share_text,
    size_text,
)
from deltasync.cli.parser import Parser, positive, seconds
from deltasync.errors import InvalidInputError

if TYPE_CHECKING:
    from deltasync.estimate import Change, Deployment, Estimate

EGRESS_USD_PER_GB = 0.09
"""About the list price of large clouds for traffic to the internet. Inside a region it is often nothing."""

ELEMENTS_MAX = 10**14
"""Weights of a model that `--params` takes: 100 times a model of a trillion weights."""

_MODEL_OPTIONS = ("params", "changed", "lr", "dtype")
_MOST = 1e9
"""Of a round trip in ms and a price in dollars: far above any real one, and far below where floats end."""

_LEAST_BITS_PER_S, _MOST_BITS_PER_S = 1.0, 1e18
_MAGNITUDES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_LINK_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def plan_arguments(parser: Parser) -> None:
    parser.explain(
        "Of two checkpoints it measures what a step changes. It sends nothing.",
        example="deltasync plan --params 8e9 --changed 1% --link 1gbit --replicas 16",
    )
    parser.add_place("old", optional=True, help="checkpoint folder or .safetensors file: measure its change to NEW")
    parser.add_place("new", optional=True, help="the checkpoint of a later step")
    model = parser.add_argument_group("the model, instead of two checkpoints")
    model.add_argument("--params", type=_elements, metavar="N", help="number of weights, such as 8e9 or 8B")
    model.add_argument("--changed", type=_share, metavar="SHARE", help="share that a step changes: 1%% or 0.01")
    model.add_argument(
        "--lr",
        type=_number("a learning rate"),
        metavar="RATE",
        help="or the learning rate: the share of measured steps",
    )
    model.add_argument("--dtype", choices=("bf16", "fp8"), help="type of the weights (default: bf16)")
    trainer = parser.add_argument_group("the trainer")
    trainer.add_argument(
        "--link", type=_bits_per_s, required=True, metavar="RATE", help="link to the store: 100mbit, 1gbit, …"
    )
    trainer.add_argument("--links", type=positive, default=1, metavar="N", help="links of all ranks (default: 1)")
    trainer.add_argument("--ranks", type=positive, default=1, metavar="N", help="ranks that publish (default: 1)")
    trainer.add_argument(
        "--every-s", type=seconds, default=60.0, metavar="S", help="seconds between published steps (default: 60)"
    )
    replicas = parser.add_argument_group("the replicas")
    replicas.add_argument("--replicas", type=positive, default=1, metavar="N", help="how many follow (default: 1)")
    replicas.add_argument(
        "--replica-link", type=_bits_per_s, metavar="RATE", help="link to the store (default: that of --link)"
    )
    replicas.add_argument(
        "--sites",
        type=positive,
        metavar="N",
        help="they are in N places, and share a link in each (default: each has its own)",
    )
    both = parser.add_argument_group("both")
    both.add_argument(
        "--rtt-ms",
        type=_number("a time in ms", least=0.0),
        default=50.0,
        metavar="MS",
        help="round trip to the store (default: 50)",
    )
    both.add_argument("--cores", type=positive, default=2, metavar="N", help="of each rank and replica (default: 2)")
    both.add_argument(
        "--egress-usd-per-gb",
        type=_number("a price", least=0.0),
        default=EGRESS_USD_PER_GB,
        metavar="USD",
        help=f"price of what replicas fetch (default: {EGRESS_USD_PER_GB})",
    )
    parser.add_threads()


def _number(what: str, *, least: float = math.ulp(0.0)) -> Callable[[str], float]:
    """A converter for a number that is above 0, or at least 0, and not beyond all bounds."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= _MOST:
            allowed = "from 0" if least == 0 else "above 0 and up"
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not {what} {allowed} to a billion")
        return value

    return convert


def _elements(text: str) -> int:
    match = re.fullmatch(r"(?P<number>[0-9.]+(?:e[0-9]+)?)(?P<magnitude>[KMBT]?)", text, re.IGNORECASE | re.ASCII)
    try:
        value = 0.0 if match is None else float(match["number"]) * _MAGNITUDES[match["magnitude"].upper()]
    except ValueError:
        value = 0.0
    if not 1 <= value <= ELEMENTS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number of weights from 1 to 100T, such as 8e9 or 8B")
    return round(value)


def _share(text: str) -> float:
    """A share in percent, or as a fraction below 1: a plain 1 could mean either."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1 or (value == 1 and not text.endswith("%")):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a share, such as 1% or 0.01")
    return value


def _bits_per_s(text: str) -> float:
    match = re.fullmatch(r"(?P<number>[0-9.]+)(?P<unit>[kmgt]bit)(?:/s|ps)?", text, re.IGNORECASE | re.ASCII)
    try:
        value = 0.0 if match is None else float(match["number"]) * _LINK_UNITS[match["unit"].lower()]
    except ValueError:
        value = 0.0
    if not _LEAST_BITS_PER_S <= value <= _MOST_BITS_PER_S:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not the rate of a link, such as 100mbit or 1gbit")
    return value


def plan(args: argparse.Namespace, out: Output) -> None:
    """Print the estimate beside that of full copies."""
    from deltasync.estimate import Deployment, Link, estimate

    for many, few, why in (
        ("links", "ranks", "a rank uploads over one link"),
        ("sites", "replicas", "a site has a replica"),
    ):
        if (getattr(args, many) or 0) > getattr(args, few):
            raise InvalidInputError(
                f"--{many} {getattr(args, many)} is more than --{few} {getattr(args, few)}",
                hint=f"{why}: give at least as many {few}",
            )
    change = _change(args, out)
    round_trip_s = args.rtt_ms / 1000
    deployment = Deployment(
        ranks=args.ranks,
        uplink=Link(bits_per_s=args.link, round_trip_s=round_trip_s),
        uplinks=args.links,
        replicas=args.replicas,
        downlink=Link(bits_per_s=args.replica_link or args.link, round_trip_s=round_trip_s),
        sites=args.sites,
        every_s=args.every_s,
        cores=args.cores,
        egress_usd_per_gb=args.egress_usd_per_gb,
    )
    found = estimate(change, deployment)
    if out.is_json:
        out.json(
            {
                "change": {**asdict(change), "density": change.density},
                "deployment": asdict(deployment),
                "step_to_live_s": found.step_to_live_s,
                "phases_s": asdict(found.phases),
                "held_s": found.held_s,
                "pause_s": found.pause_s,
                "versions_per_hour": found.versions_per_hour,
                "publish_every_s": found.publish_every_s,
                "follow_every_s": found.follow_every_s,
                "traffic": asdict(found.traffic),
                "anchor": {
                    "versions": found.anchor_versions,
                    "bytes": change.anchor_bytes,
                    "put_s": found.anchor_put_s,
                },
                "join": {"bytes": found.join_bytes, "seconds": found.join_s},
                "memory": {"rank_bytes": found.trainer_memory_bytes, "replica_bytes": found.replica_memory_bytes},
                "full_copy": {
                    "step_to_live_s": found.copy_step_to_live_s,
                    "every_s": found.copy_every_s,
                    **asdict(found.copy_traffic),
                },
            }
        )
    else:
        _print(out, change, deployment, found)


def _change(args: argparse.Namespace, out: Output) -> "Change":
    from deltasync.estimate import Change, density_at

    given = [f"--{name}" for name in _MODEL_OPTIONS if getattr(args, name) is not None]
    if args.old is not None:
        if args.new is None:
            raise InvalidInputError(f"{args.old} is one checkpoint", hint="give two, the older one first, or --params")
        if given:
            raise InvalidInputError(f"{given[0]} is measured where two checkpoints are given", hint="leave it out")
        with out.bars() as progress:
            change = Change.measured(args.old, args.new, progress=progress)
        if not change.changed:
            raise InvalidInputError(
                f"{args.old} and {args.new} have the same weights", hint="give checkpoints of different steps"
            )
        return change
    if args.params is None or (args.changed is None) == (args.lr is None):
        raise InvalidInputError(
            "`plan` takes two checkpoints, or --params with one of --changed and --lr",
            hint="such as --params 8e9 --changed 1%",
        )
    dtype = args.dtype or "bf16"
    if args.lr is not None and dtype != "bf16":
        raise InvalidInputError(f"--lr is known for bf16, not for {dtype}", hint="give --changed instead")
    return Change.assumed(args.params, args.changed or density_at(args.lr), dtype=dtype)


def _print(out: Output, change: "Change", deployment: "Deployment", found: "Estimate") -> None:
    is_plain = out.columns is None

    def size(nbytes: float) -> str:
        return str(round(nbytes)) if is_plain else size_text(round(nbytes))

    def duration(seconds: float) -> str:
        return f"{seconds:.6g}" if is_plain else duration_text(seconds)

    def dollars(usd: float) -> str:
        return f"{usd:.6g}" if is_plain else f"${usd:,.2f}"

    anchors = "none"
    if found.anchor_versions is not None:
        anchors = f"{size_text(change.anchor_bytes)}, one in {count_text(found.anchor_versions, 'version')}"
    out.fields(
        (
            ("weights", f"{number_text(change.elements)} elements, {size_text(change.weight_bytes)}"),
            (
                "a step",
                f"changes {share_text(change.changed, change.elements)}, {size_text(change.delta_bytes)}: "
                f"{bits_text(change.delta_bytes, change.changed)} bits for each change",
            ),
            ("anchors", anchors),
            (
                "versions",
                f"{found.versions_per_hour:,.1f} an hour; one can be published every "
                f"{duration_text(found.publish_every_s)} and taken every {duration_text(found.follow_every_s)}, "
                f"a full copy every {duration_text(found.copy_every_s)}",
            ),
        )
    )
    ours, copy = found.traffic, found.copy_traffic
    rows: Mapping[str, tuple[str, str | None]] = {
        "from step to live": (duration(found.step_to_live_s), duration(found.copy_step_to_live_s)),
        "trainer held": (duration(found.held_s), None),
        "serving paused": (duration(found.pause_s), None),
        "put for a version, with anchors": (size(ours.up_bytes), size(copy.up_bytes)),
        "fetched by all replicas for it": (size(ours.down_bytes), size(copy.down_bytes)),
        "put in an hour": (size(ours.up_bytes_per_hour), size(copy.up_bytes_per_hour)),
        "fetched in an hour": (size(ours.down_bytes_per_hour), size(copy.down_bytes_per_hour)),
        "egress in an hour": (dollars(ours.egress_usd_per_hour), dollars(copy.egress_usd_per_hour)),
        "memory of a rank": (size(found.trainer_memory_bytes), None),
        "memory of a replica": (size(found.replica_memory_bytes), None),
        "fetched by a late replica": (size(found.join_bytes), size(change.weight_bytes)),
        "until it is at the head": (duration(found.join_s), duration(deployment.downlink.seconds(change.weight_bytes))),
    }
    columns = (Column("estimate", is_name=True), Column("deltasync"), Column("full copies"))
    trainers, fleet = count_text(deployment.ranks, "rank"), count_text(deployment.replicas, "replica")
    out.table(f"{trainers}, {fleet}; full copies are the transfer alone", columns, [(k, *v) for k, v in rows.items()])
    total_s = found.step_to_live_s
    out.table(
        "from step to live, what overlaps counted once",
        (Column("phase", is_name=True), Column("seconds", "{:.3f}".format), Column("share", "{:.1f} %".format)),
        [(name, round(s, 6), round(100 * s / total_s, 3)) for name, s in asdict(found.phases).items()],
    )
    out.line("an estimate from rates measured on two cores, not a measurement: docs/commands.md#plan")
