"""The manifests of examples/kubernetes: valid against the schemas of Kubernetes, and commands that exist."""

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltasync.cli.main import parse

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
RELEASES = ("1.30", "1.37")
"""The oldest and the newest release of Kubernetes that the manifests are checked against."""

needs_schemas = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None and "CI" not in os.environ,
    reason="kubernetes-validate is not installed: make .venv/e2e.stamp",
)


def documents(file: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document is not None]


def pods(document: Any) -> Iterator[dict[str, Any]]:
    """Every pod that a document describes."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        for value in document.values():
            yield from pods(value)


def test_there_are_manifests() -> None:
    assert [file.name for file in FILES] == ["maintenance.yaml", "sglang.yaml", "vllm.yaml"]


@needs_schemas
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_document_is_valid(file: Path, release: str) -> None:
    import kubernetes_validate

    for document in documents(file):
        kubernetes_validate.validate(document, release, strict=True)


@needs_schemas
def test_a_document_that_is_not_valid_is_found() -> None:
    import kubernetes_validate

    document = next(d for d in documents(FOLDER / "vllm.yaml") if d["kind"] == "Deployment")
    document["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(document, RELEASES[-1], strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_command_of_ours_is_understood(file: Path) -> None:
    found = 0
    for document in documents(file):
        for pod in pods(document):
            for container in pod["containers"]:
                if container["command"][0] == "deltasync":
                    environment = {item["name"]: item.get("value", "x") for item in container.get("env", [])}
                    parse([*container["command"][1:], *container["args"]], environment=environment)
                    found += 1
    assert found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_pods_have_no_rights_in_the_cluster_and_all_their_volumes(file: Path) -> None:
    names = {d["metadata"]["name"] for d in documents(file) if d["kind"] == "ServiceAccount"}
    for document in documents(file):
        for pod in pods(document):
            assert pod["serviceAccountName"] in names
            assert pod["automountServiceAccountToken"] is False
            volumes = {volume["name"] for volume in pod.get("volumes", [])}
            mounted = {mount["name"] for c in pod["containers"] for mount in c.get("volumeMounts", [])}
            assert mounted == volumes
            for container in pod["containers"]:
                ports = {port["name"] for port in container.get("ports", [])}
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    if probe in container:
                        assert container[probe]["httpGet"]["port"] in ports


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_secret_is_created_by_the_readme(file: Path) -> None:
    created = set(re.findall(r"kubectl create secret generic (\S+)", (FOLDER / "README.md").read_text()))
    named = set(re.findall(r"secret(?:KeyRef|Ref|): \{(?:secretName|name): ([\w-]+)", file.read_text()))
    assert named
    assert named <= created
