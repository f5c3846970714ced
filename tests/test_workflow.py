"""The hosted CI runs the tests on every system and Python that the package promises, and no workflow has secrets."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CI, RELEASE = WORKFLOWS
PINNED = re.compile(r"actions/(checkout|setup-python)@v\d+")


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    """Return the jobs of a workflow by name."""
    content: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content["jobs"]


def promised() -> set[str]:
    """Return the versions of Python among the classifiers of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    matches = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in project["classifiers"])
    return {match[1] for match in matches if match}


def test_there_is_one_workflow_for_tests_and_one_for_releases() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


def test_every_job_runs_the_tests_or_the_demo_and_nothing_else() -> None:
    for name, job in jobs(CI).items():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands == [".ci/demo" if name == "windows" else ".ci/run"], name
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(map(PINNED.fullmatch, actions)), actions
        assert job["timeout-minutes"] <= 360, name
        assert "continue-on-error" not in str(job), name


def test_the_script_of_the_ci_ends_with_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").rstrip().endswith("exec make test")


def test_the_tests_run_on_linux_on_two_architectures_and_on_macos_with_every_promised_python() -> None:
    matrix = jobs(CI)["test"]["strategy"]["matrix"]
    assert promised() <= set(matrix["python"]) == set(jobs(CI)["windows"]["strategy"]["matrix"]["python"])
    assert [re.sub(r"[-\d.]+", "-", name) for name in matrix["os"]] == ["ubuntu-", "ubuntu-arm", "macos-"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_knows_no_secret_and_may_only_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "secrets" not in text
    assert "token" not in text.lower().replace("id-token: write", "")
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in text


def test_a_release_is_published_from_a_tag_by_a_job_that_runs_nothing_else() -> None:
    content: dict[Any, Any] = yaml.safe_load(RELEASE.read_text(encoding="utf-8"))
    assert content[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}, "YAML reads the key `on` as true"
    build, publish = (content["jobs"][name] for name in ("build", "publish"))
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("run" in step for step in publish["steps"])


def test_the_guides_promise_the_same_pythons() -> None:
    for page in ("README.md", "docs/first-steps.md", "docs/policy.md"):
        versions = set(re.findall(r"\b3\.\d\d\b", (ROOT / page).read_text(encoding="utf-8")))
        assert versions == promised(), page
