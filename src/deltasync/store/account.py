"""The account of a store from the environment: endpoint, region and keys. It is read when a store is opened.

obstore reads the environment by itself. This module adds the profile in the AWS configuration files (static keys only),
a private certificate authority, and plain HTTP for an endpoint that begins with http://.
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
    """Settings for obstore beyond those that it reads from the environment. They may be secret: the repr omits them."""

    config: dict[str, Any] = field(repr=False)
    client_options: dict[str, Any] = field(repr=False)


def read_account(kind: str, environment: Mapping[str, str] = os.environ) -> Account:
    """The account for `s3`, `gs` or `az`. InvalidInputError for a profile that does not exist or has no keys."""
    config: dict[str, Any] = {}
    options: dict[str, Any] = {}
    endpoint = next((environment[name] for name in _ENDPOINTS[kind] if environment.get(name)), None)
    if kind == "s3":
        profile = _read_profile(environment)
        # One request per object: not every S3 server supports bulk deletes.
        config["disable_bulk_delete"] = True
        config |= _s3_login(environment, profile)
        if not environment.get("AWS_REGION") and not environment.get("AWS_DEFAULT_REGION") and "region" in profile:
            config["region"] = profile["region"]
        if endpoint is None and "endpoint_url" in profile:
            endpoint = config["endpoint"] = profile["endpoint_url"]
        if environment.get("AWS_CA_BUNDLE"):
            bundle = Path(environment["AWS_CA_BUNDLE"])
            try:
                options["root_certificate"] = bundle.read_bytes()
            except OSError as error:
                raise InvalidInputError(
                    f"{bundle} cannot be read: {error.strerror}", hint="correct or unset AWS_CA_BUNDLE"
                ) from error
    if endpoint is not None:
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidInputError(
                f"{endpoint!r:.200} is not an endpoint", hint="an endpoint begins with https:// or http://"
            )
        options["allow_http"] = endpoint.startswith("http://")
    return Account(config, options)


def _s3_login(environment: Mapping[str, str], profile: Mapping[str, str]) -> dict[str, Any]:
    """The keys of the profile, unless the environment has some: the order of precedence of AWS's own tools."""
    if environment.get("AWS_ACCESS_KEY_ID") or environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return {}
    login = {ours: profile[theirs] for theirs, ours in _S3_KEYS.items() if theirs in profile}
    if "access_key_id" in login and "secret_access_key" in login:
        return login
    if not _NOT_STATIC.isdisjoint(profile):
        raise InvalidInputError(
            f"the AWS profile {_profile_name(environment)!r} has no keys, only a way to get them",
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
    """The settings of the chosen profile; the credentials file takes precedence. Empty if there are no files."""
    name = _profile_name(environment)
    # Unlike `Path.expanduser`, it leaves `~` in place for a user without a home: there are no files there.
    home = Path(os.path.expanduser(environment.get("HOME") or "~"), ".aws")
    config = _read_ini(Path(environment.get("AWS_CONFIG_FILE") or home / "config"))
    credentials = _read_ini(Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"))
    section = "default" if name == "default" else f"profile {name}"
    if name != "default" and not config.has_section(section) and not credentials.has_section(name):
        raise InvalidInputError(f"there is no AWS profile {name!r}", hint="check AWS_PROFILE and ~/.aws")
    settings: dict[str, str] = {}
    for parser, wanted in ((config, section), (credentials, name)):
        if parser.has_section(wanted):
            settings |= {key: value for key, value in parser.items(wanted) if value}
    return settings


def _read_ini(path: Path) -> configparser.RawConfigParser:
    # No section inherits from `default`: for AWS it is a profile like any other.
    parser = configparser.RawConfigParser(default_section="", strict=False, allow_no_value=True)
    place = os.path.expanduser(path)
    # As in AWS's own tools, a file out of reach, in the home of another user, is not there. `Path.exists` would raise.
    if not os.path.exists(place):
        return parser
    try:
        parser.read_string(Path(place).read_text(encoding="utf-8"))
    except (configparser.Error, OSError, UnicodeDecodeError):
        # The parser's message quotes the line, which may hold a secret.
        raise InvalidInputError(f"{path} cannot be read", hint="fix it, or use environment variables") from None
    return parser
