"""The arguments of commands on feeds: from publish to export, and doctor."""

from pathlib import Path

from deltasync.cli.output import ROWS_MAX
from deltasync.cli.parser import (
    FEED_VARIABLE,
    Commands,
    add_base,
    add_command,
    add_follow_flag,
    add_listen,
    add_require_fencing,
    add_shadow,
    add_threads,
    add_trust_code,
    add_url,
    number_within,
    positive,
    seconds,
    version_or_name,
    whole_number,
)

PROBE_MB_MAX = 1024
"""The bandwidth probe is held in memory twice."""


def add_publish(commands: Commands) -> None:
    parser = add_command(
        commands,
        "publish",
        "feeds",
        "Commit a checkpoint as the next version of a feed.",
        more="The first version has all weights; later ones have only what changed.",
        example="deltasync publish s3://bucket/run-42 checkpoints/step-100 --step 100",
    )
    add_url(parser)
    parser.add_place("checkpoint", help="checkpoint folder or .safetensors file; with --watch, a pattern of folders")
    parser.add_argument("--step", type=whole_number, metavar="N", help="the trainer's step, as information")
    parser.add_argument(
        "--parent",
        type=Path,
        metavar="CHECKPOINT",
        help="the checkpoint that was published last (default: rebuild it from the feed)",
    )
    parser.add_argument(
        "--anchor",
        action="store_true",
        help="add all weights, for replicas that join late; required if the set of tensors changed",
    )
    parser.add_argument(
        "--base",
        metavar="NAME[@REVISION]",
        help="first version only: replicas have this checkpoint as NAME, a folder or a Hub id; nothing is uploaded",
    )
    add_trust_code(parser, "publish")
    add_require_fencing(parser)
    parser.add_argument("--must-exist", action="store_true", help="refuse to start a new feed")
    add_threads(parser)
    watch = parser.add_argument_group("checkpoints as they appear")
    watch.add_argument(
        "--watch",
        action="store_true",
        help="publish every folder that matches, such as 'run/weights/step_*', once it is complete; until SIGINT",
    )
    watch.add_argument("--once", action="store_true", help="publish the folders that are there, then exit")
    watch.add_argument("--after", type=whole_number, metavar="N", help="leave out folders with a number up to N")
    watch.add_argument("--marker", metavar="NAME", help="a folder is complete only with this file in it")
    watch.add_argument(
        "--settle-s",
        type=seconds,
        metavar="S",
        help="a folder is complete only if its files have not changed for S seconds (default: 2)",
    )
    add_shadow(watch)
    watch.add_argument("--keep-anchors", type=positive, metavar="N", help="prune the feed, as `deltasync prune` does")
    watch.add_argument("--keep-versions", type=positive, metavar="N", help="prune the feed, as `deltasync prune` does")


def add_log(commands: Commands) -> None:
    parser = add_command(
        commands,
        "log",
        "feeds",
        "List the versions of a feed.",
        more="Prints when each was committed, how much changed, and the feed's size.",
        example="deltasync log s3://bucket/run-42",
    )
    add_url(parser)
    parser.add_argument("--all", action="store_true", help=f"list every version, not only the newest {ROWS_MAX}")


def add_show(commands: Commands) -> None:
    parser = add_command(
        commands,
        "show",
        "feeds",
        "Describe one version, and list what a restore of it fetches.",
        more="Without a version it describes the newest one.",
        example="deltasync show s3://bucket/run-42 17",
    )
    add_url(parser)
    parser.add_place(
        "version", version_or_name, optional=True, help="the version, or the name of a pin (default: the newest)"
    )
    parser.add_argument(
        "--timeline", action="store_true", help="list its steps instead, from the capture to replicas that serve it"
    )


def add_verify(commands: Commands) -> None:
    parser = add_command(
        commands,
        "verify",
        "feeds",
        "Check every version of a feed.",
        more="Reports damage, the versions that it costs, and those that can be restored.",
        example="deltasync verify s3://bucket/run-42 --deep",
    )
    add_url(parser)
    parser.add_argument("--deep", action="store_true", help="fetch and decode every payload, too")
    add_base(parser)
    add_threads(parser)


def add_restore(commands: Commands) -> None:
    parser = add_command(
        commands,
        "restore",
        "feeds",
        "Write a version as a checkpoint folder.",
        more="The folder appears whole, after every bit of it is proved, or not at all.",
        example="deltasync restore s3://bucket/run-42 -o checkpoint --version 17",
    )
    add_url(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--version", type=version_or_name, metavar="N", help="the version, or the name of a pin (default: the newest)"
    )
    add_base(parser)
    parser.add_argument(
        "--no-files", action="store_true", help="write only the weights, without configuration and tokenizer"
    )
    add_trust_code(parser, "write")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be fetched")
    add_threads(parser)


def add_prune(commands: Commands) -> None:
    parser = add_command(
        commands,
        "prune",
        "upkeep",
        "Delete the payloads of old versions.",
        more="Without --yes it only lists them. It may run beside a publisher.",
        example="deltasync prune s3://bucket/run-42 --keep-anchors 2 --keep-versions 99",
    )
    add_url(parser)
    parser.add_argument(
        "--keep-anchors", type=positive, required=True, metavar="N", help="keep at least this many anchors"
    )
    parser.add_argument(
        "--keep-versions", type=positive, required=True, metavar="N", help="keep at least this many versions restorable"
    )
    parser.add_argument(
        "--keep-s", type=seconds, metavar="S", help="keep every version restorable that was committed within S seconds"
    )
    parser.add_argument("--yes", action="store_true", help="delete; without it nothing is deleted")
    parser.add_argument("--follow", action="store_true", help="with --yes: prune repeatedly, until SIGINT or SIGTERM")
    parser.add_argument(
        "--every-s", type=seconds, default=60.0, metavar="S", help="with --follow: about every S seconds (default: 60)"
    )
    add_listen(parser)


def add_compact(commands: Commands) -> None:
    parser = add_command(
        commands,
        "compact",
        "upkeep",
        "Write skips, so that late replicas fetch less.",
        more="A skip leads over many versions at once. It may run beside a publisher.",
        example="deltasync compact s3://bucket/run-42 --follow",
    )
    add_url(parser)
    add_follow_flag(parser)
    parser.add_argument(
        "--levels",
        type=_levels,
        metavar="N,N,…",
        help="versions that a skip leads over, each a multiple of the one before (default: 4,16,64)",
    )
    add_listen(parser)
    add_threads(parser)


def _levels(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def add_relay(commands: Commands) -> None:
    parser = add_command(
        commands,
        "relay",
        "upkeep",
        "Copy a feed to other stores.",
        more="Only what a destination does not have is sent. An interrupted copy goes on.",
        example="deltasync relay s3://us-bucket/run-42 s3://eu-bucket/run-42 --follow",
    )
    add_url(parser)
    parser.add_place("destination", repeated=True, help="where to copy it to: an empty place, or an earlier copy")
    add_follow_flag(parser)
    parser.add_argument(
        "--every", action="store_true", help="copy every version that can be restored, however far behind"
    )
    parser.add_argument("--no-anchors", action="store_true", help="do not copy anchors that were added to versions")
    parser.add_argument("--skips", action="store_true", help="copy skips, too")
    parser.add_argument(
        "--heartbeats", action="store_true", help="let the source know the replicas of the destinations"
    )
    add_listen(parser)


def add_pin(commands: Commands) -> None:
    parser = add_command(
        commands,
        "pin",
        "upkeep",
        "Keep a version for good, under a name.",
        more="`prune` deletes nothing that it needs, and its name stands for its number.",
        example="deltasync pin s3://bucket/run-42 17 --name best --note 'reward 0.71'",
    )
    add_url(parser)
    parser.add_place("version", version_or_name, help="the version, or the name of another pin")
    parser.add_argument(
        "--name", metavar="NAME", help="letters, digits, `.`, `_` and `-`, a letter first (default: v and the version)"
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="why, for people")


def add_unpin(commands: Commands) -> None:
    parser = add_command(
        commands,
        "unpin",
        "upkeep",
        "Remove a pin, or all pins of a version.",
        more="The next `prune` may delete the version.",
        example="deltasync unpin s3://bucket/run-42 best",
    )
    add_url(parser)
    parser.add_place("version", version_or_name, help="the name of the pin, or a version")


def add_pins(commands: Commands) -> None:
    parser = add_command(
        commands,
        "pins",
        "upkeep",
        "List the pins of a feed.",
        more="Prints their names, versions and notes.",
        example="deltasync pins s3://bucket/run-42",
    )
    add_url(parser)


def add_import(commands: Commands) -> None:
    parser = add_command(
        commands,
        "import",
        "folders",
        "Publish folders of deltas, as slime writes them, to a feed.",
        more="Each weight_v… becomes a version, after every tensor passed its checksum.",
        example="deltasync import run/weights s3://bucket/run-42 --base Qwen3-8B --follow",
    )
    parser.set_defaults(function="import_folders")
    parser.add_place("folders", help="the folder that the trainer writes weight_v000001, … to")
    add_url(parser)
    add_follow_flag(parser, "folders")
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="the checkpoint that the trainer began with: the version of a new feed"
    )
    parser.add_argument(
        "--restart", action="store_true", help="the trainer began again at --base: publish that, then the folders"
    )
    add_shadow(parser)
    add_require_fencing(parser)
    add_threads(parser)


def add_export(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        "folders",
        "Write a feed as folders of deltas, as slime and others read them.",
        more="The first folder is a checkpoint, each further one the change to a version.",
        example="deltasync export s3://bucket/run-42 shared/weights --follow",
    )
    add_url(parser)
    parser.add_place("folders", help="folder to write weight_v000000, … to")
    add_follow_flag(parser)
    parser.add_argument(
        "--format", choices=("xor", "overwrite"), default="xor", help="how changes are written (default: xor)"
    )
    parser.add_argument(
        "--checksum",
        choices=("adler32", "xxh3-128", "blake3"),
        default="adler32",
        help="checksum of each tensor (default: adler32)",
    )
    parser.add_argument(
        "--from", dest="start", type=whole_number, metavar="N", help="first version (default: the oldest that is kept)"
    )
    add_base(parser)
    add_trust_code(parser, "write")
    add_threads(parser)


def add_doctor(commands: Commands) -> None:
    parser = add_command(
        commands,
        "doctor",
        "doctor",
        "Check this machine and, with a URL, the store of a feed.",
        more="Writes only objects under probes/, and removes them. Exits with 1 on failure.",
        example="deltasync doctor s3://bucket/run-42",
    )
    parser.add_place(
        "url", optional=True, help=f"the feed (default: {FEED_VARIABLE}; without it, only this machine is checked)"
    )
    parser.add_argument("--read-only", action="store_true", help="write nothing: only list and read")
    parser.add_argument(
        "--probe-mb",
        type=lambda text: number_within(text, least=1, most=PROBE_MB_MAX),
        default=8,
        metavar="N",
        help="size of the bandwidth probe in MB (default: 8)",
    )
