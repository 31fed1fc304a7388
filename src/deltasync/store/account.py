"""What the environment says about an account: endpoint, region, keys. Read when a store is opened, and never shown.

obstore reads the environment by itself. Added here is what it does not do: the profile in the AWS configuration files
(static keys only), a private certificate authority, and plain HTTP for an endpoint that says http://.
"""

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltasync.errors import InvalidInputError

KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "azure": "az", "adl": "az", "abfs": "az", "abfss": "az"}
"""Schemes of URLs, and the kind of service that each means."""

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_S3_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_OTHER_S3_LOGINS = (
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_NOT_STATIC = frozenset({"role_arn", "source_profile", "credential_process", "sso_session", "sso_account_id"})


@dataclass(frozen=True, slots=True)
class Account:
    """Settings for obstore, on top of what it finds in the environment. They may hold a secret: not in the repr."""

    config: dict[str, Any] = field(repr=False)
    client_options: dict[str, Any] = field(repr=False)


def read_account(kind: str, environment: Mapping[str, str] = os.environ) -> Account:
    """The account for `s3`, `gs` or `az`. InvalidInputError for a profile that is not there, or that has no keys."""
    config: dict[str, Any] = {}
    options: dict[str, Any] = {}
    endpoint = next((environment[name] for name in _ENDPOINTS[kind] if environment.get(name)), None)
    if kind == "s3":
        profile = _read_profile(environment)
        # One request for each object: not every S3 server knows the other way.
        config["disable_bulk_delete"] = True
        config |= _s3_login(environment, profile)
        if not environment.get("AWS_REGION") and not environment.get("AWS_DEFAULT_REGION") and "region" in profile:
            config["region"] = profile["region"]
        if endpoint is None and "endpoint_url" in profile:
            endpoint = config["endpoint"] = profile["endpoint_url"]
        if environment.get("AWS_CA_BUNDLE"):
            options["root_certificate"] = _read_certificates(Path(environment["AWS_CA_BUNDLE"]))
    if endpoint is not None:
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidInputError(f"{endpoint!r:.200} is not an endpoint", hint="it begins with https:// or http://")
        options["allow_http"] = endpoint.startswith("http://")
    return Account(config, options)


def _s3_login(environment: Mapping[str, str], profile: Mapping[str, str]) -> dict[str, Any]:
    """Keys of the profile, unless the environment has some: the order in which AWS's own tools look."""
    if environment.get("AWS_ACCESS_KEY_ID") or environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return {}
    found = {ours: profile[theirs] for theirs, ours in _S3_KEYS.items() if theirs in profile}
    if "access_key_id" in found and "secret_access_key" in found:
        return found
    if not _NOT_STATIC.isdisjoint(profile):
        raise InvalidInputError(
            f"the AWS profile {_profile_name(environment)!r} holds no keys, but says where to get some",
            hint="export them first: aws configure export-credentials --format env",
        )
    no_instance = environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if no_instance and not any(environment.get(name) for name in _OTHER_S3_LOGINS):
        raise InvalidInputError(
            "there are no AWS credentials", hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    return {}


def _profile_name(environment: Mapping[str, str]) -> str:
    return environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"


def _read_profile(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of the chosen profile; the credentials file has the last word. Empty if there are no files."""
    name = _profile_name(environment)
    home = Path(environment.get("HOME") or "~").expanduser() / ".aws"
    config = _read_ini(Path(environment.get("AWS_CONFIG_FILE") or home / "config"))
    credentials = _read_ini(Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"))
    section = "default" if name == "default" else f"profile {name}"
    if name != "default" and not config.has_section(section) and not credentials.has_section(name):
        raise InvalidInputError(f"there is no AWS profile {name!r}", hint="check AWS_PROFILE and ~/.aws")
    found: dict[str, str] = {}
    for parser, wanted in ((config, section), (credentials, name)):
        if parser.has_section(wanted):
            found |= {key: value for key, value in parser.items(wanted) if value}
    return found


def _read_ini(path: Path) -> configparser.RawConfigParser:
    # Nothing of these files is inherited by another section: AWS's `default` is a profile like any other.
    parser = configparser.RawConfigParser(default_section="", strict=False, allow_no_value=True)
    try:
        parser.read_string(path.expanduser().read_text())
    except FileNotFoundError:
        pass
    except (configparser.Error, OSError, UnicodeDecodeError):
        # The parser's own words quote the line, and that may hold a secret.
        raise InvalidInputError(f"{path} cannot be read", hint="repair it, or use environment variables") from None
    return parser


def _read_certificates(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{path}: {error.strerror}", hint="AWS_CA_BUNDLE names it") from error
