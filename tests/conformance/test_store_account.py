"""Endpoint, region and keys from the environment and the files of AWS; and what is said about them."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support import processes

from deltasync.errors import InvalidInputError
from deltasync.store.account import read_account

KEYS = {"access_key_id": "file-key", "secret_access_key": "file-secret"}
ALWAYS = {"disable_bulk_delete": True}
CREDENTIALS = """
[default]
aws_access_key_id = file-key
aws_secret_access_key = file-secret
[session]
aws_access_key_id = file-key
aws_secret_access_key = file-secret
aws_session_token = file-token
[half]
aws_access_key_id = file-key
"""
CONFIG = """
[default]
region = eu-central-1
[profile session]
region = eu-north-1
endpoint_url = http://10.0.0.1:9000
s3 =
    addressing_style = path
[profile role]
role_arn = arn:aws:iam::1:role/x
source_profile = default
[profile login]
sso_session = work
[profile in-config]
aws_access_key_id = file-key
aws_secret_access_key = file-secret
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "config").write_text(CONFIG)
    (tmp_path / "credentials").write_text(CREDENTIALS)
    return {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }


@pytest.mark.parametrize(
    ("environment", "config", "options"),
    [
        ({}, {**KEYS, "region": "eu-central-1"}, {}),
        ({"AWS_PROFILE": "in-config"}, KEYS, {}),
        (
            {"AWS_PROFILE": "session"},
            {**KEYS, "session_token": "file-token", "region": "eu-north-1", "endpoint": "http://10.0.0.1:9000"},
            {"allow_http": True},
        ),
        # The environment has the first word, and obstore reads it by itself.
        ({"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "r"}, {}, {}),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_DEFAULT_REGION": "r"}, {}, {}),
        ({"AWS_PROFILE": "session", "AWS_ENDPOINT_URL": "https://h", "AWS_REGION": "r"},
         {**KEYS, "session_token": "file-token"}, {"allow_http": False}),
        ({"AWS_PROFILE": "in-config", "AWS_ENDPOINT_URL": "http://h"}, KEYS, {"allow_http": True}),
        ({"AWS_PROFILE": "in-config", "AWS_ENDPOINT_URL": "http://h", "AWS_ENDPOINT_URL_S3": "https://h"}, KEYS,
         {"allow_http": False}),
    ],
)  # fmt: skip
def test_s3(
    files: dict[str, str], environment: dict[str, str], config: dict[str, Any], options: dict[str, Any]
) -> None:
    account = read_account("s3", {**files, **environment})
    assert account.config == {**ALWAYS, **config}
    assert account.client_options == options
    assert "secret" not in repr(account)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"AWS_PROFILE": "absent"}, "there is no AWS profile 'absent'"),
        ({"AWS_PROFILE": "role"}, "export-credentials"),
        ({"AWS_PROFILE": "login"}, "export-credentials"),
        ({"AWS_PROFILE": "half", "AWS_EC2_METADATA_DISABLED": "true"}, "there are no AWS credentials"),
        ({"AWS_CA_BUNDLE": "/no/such/file"}, "AWS_CA_BUNDLE"),
        ({"AWS_ENDPOINT_URL": "127.0.0.1:9000"}, "is not an endpoint"),
    ],
)
def test_s3_without_keys(files: dict[str, str], environment: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_account("s3", {**files, **environment})
    assert said in str(caught.value)


def test_files_are_found_in_the_home_folder(tmp_path: Path) -> None:
    assert read_account("s3", {"HOME": str(tmp_path)}).config == ALWAYS
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS)
    assert read_account("s3", {"HOME": str(tmp_path)}).config == {**ALWAYS, **KEYS}


def test_there_is_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert read_account("s3", {"HOME": str(tmp_path / "none")}).config == ALWAYS
    assert read_account("s3", {"HOME": str(tmp_path / "file")}).config == ALWAYS
    # A container may run as a user that its system does not know.
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert read_account("s3", {}).config == ALWAYS


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_home_folder_of_another_user_has_no_files(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS)
    tmp_path.chmod(0)
    try:
        assert read_account("s3", {"HOME": str(tmp_path)}).config == ALWAYS
    finally:
        tmp_path.chmod(0o700)


def test_files_are_utf_8_whatever_the_locale(files: dict[str, str]) -> None:
    path = Path(files["AWS_SHARED_CREDENTIALS_FILE"])
    path.write_text(f"# Schlüssel\n{CREDENTIALS}", encoding="utf-8")
    done = processes.run(
        [sys.executable, "-c", "from deltasync.store.account import *; print(read_account('s3').config)"],
        env={**os.environ, **files, "LC_ALL": "C", "PYTHONUTF8": "0"},
        check=True,
    )
    assert "file-key" in done.stdout


@pytest.mark.parametrize("content", [b"aws_secret_access_key = file-secret\n", b"[default\nfile-secret", b"\xff\xfe"])
def test_a_broken_file_is_named_and_not_quoted(files: dict[str, str], content: bytes) -> None:
    Path(files["AWS_SHARED_CREDENTIALS_FILE"]).write_bytes(content)
    with pytest.raises(InvalidInputError, match="credentials cannot be read") as caught:
        read_account("s3", files)
    assert "file-secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_private_authority(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"certificates")
    account = read_account("s3", {**files, "AWS_CA_BUNDLE": str(tmp_path / "ca.pem")})
    assert account.client_options == {"root_certificate": b"certificates"}


@pytest.mark.parametrize(
    ("kind", "environment", "options"),
    [
        ("gs", {}, {}),
        ("gs", {"GOOGLE_BASE_URL": "http://127.0.0.1:1"}, {"allow_http": True}),
        ("az", {"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/account"}, {"allow_http": True}),
        ("az", {"AZURE_STORAGE_ENDPOINT": "https://127.0.0.1:1/account"}, {"allow_http": False}),
    ],
)
def test_google_and_azure(kind: str, environment: dict[str, str], options: dict[str, Any]) -> None:
    account = read_account(kind, environment)
    assert account.config == {}
    assert account.client_options == options
