"""What a person who has just cloned the repository relies on: the script, the pins, the README."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from runtime.config import load_config

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(COMPOSE_TEXT)
PROCESSES = ("controller", "agent", "recorder", "metrics", "notifier", "app")
SECRETS = (
    "COUNTERPOISE_REDIS_PASSWORD",
    "COUNTERPOISE_POSTGRES_PASSWORD",
    "COUNTERPOISE_CONTROL_KEY",
)

# Paths of one machine, and addresses of package indexes: neither holds elsewhere.
ELSEWHERE_WRONG = (
    re.compile(r"(?<![\w/.-])/(?:work|root|home/\w+)/"),
    re.compile(r"https?://[\w.-]*(?:pypi|pythonhosted|pytorch|debian|npmjs)[\w.-]*"),
)


def run_script(*arguments: str, shell: tuple[str, ...] = (), **options: object) -> str:
    """Output of `./run ARGUMENTS`, which must succeed."""
    done = subprocess.run(
        [*shell, str(ROOT / "run"), *arguments],
        check=True, capture_output=True, text=True, timeout=15, stdin=subprocess.DEVNULL, **options,
    )  # fmt: skip
    return done.stdout


def requirement_name(requirement: str) -> str:
    return re.split(r"[\[\]<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


# --- the distribution ----------------------------------------------------------------------------


def test_distribution_cannot_be_uploaded_by_mistake() -> None:
    assert PROJECT["project"]["name"] == "counterpoise"
    assert "Private :: Do Not Upload" in PROJECT["project"]["classifiers"]


def test_every_direct_dependency_is_pinned() -> None:
    project = PROJECT["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["dev"], "uv"]
    assert {requirement_name(r) for r in required} <= pins().keys()


def test_pins_hold_on_any_machine() -> None:
    assert "://" not in (ROOT / "constraints.txt").read_text()
    local_versions = {name for name, version in pins().items() if "+" in version}
    assert not local_versions, "a local version such as +cpu exists on some machines only"


# --- ./run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_run_is_plain_posix_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n", ROOT / "run"], check=True, timeout=10)


def test_run_help_names_its_commands() -> None:
    output = run_script("help", env={"PATH": os.defpath})
    for command in ("setup", "test", "check", "bench", "help", "up"):
        assert f"./run {command}" in output


def test_run_works_from_another_folder_and_by_a_path_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(ROOT / "run", folder / "run")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    done = subprocess.run(
        [folder / "run", "help"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=15,
    )
    assert done.stdout.startswith("usage: ./run COMMAND")
    assert done.stderr == ""


def test_unsupported_python_is_named(tmp_path: Path) -> None:
    """With only an old python3 on the PATH, the message says what was found and what is needed."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("cat", "cksum", "dirname", "id", "uname"):
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)
    old = tools / "python3"
    old.write_text('#!/bin/sh\ncase "$2" in *platform*) echo 3.9.2 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    for name in ("run", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        ["/bin/sh", tmp_path / "run", "setup"],
        env={"PATH": str(tools)}, capture_output=True, text=True, timeout=15, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "needs Python 3.11, 3.12 or 3.13; found 3.9.2" in done.stderr
    assert not (tmp_path / ".venv").exists()


# --- the README and continuous integration -------------------------------------------------------


def readme_commands() -> list[list[str]]:
    """Every `./run X` and `counterpoise X` line in the README's shell blocks, split into words."""
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", readme(), re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if not line.startswith("#")]
    return [line for line in words if line and line[0] in ("./run", "counterpoise")]


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_readme_commands_exist() -> None:
    pytest.importorskip("runtime.cli", exc_type=ModuleNotFoundError)
    own = re.findall(
        r"^  \./run ([a-z]+)", run_script("help", env={"PATH": os.defpath}), re.MULTILINE
    )
    product = subprocess.run(
        [sys.executable, "-m", "counterpoise", "--help"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=15,
    ).stdout  # fmt: skip
    known = set(re.findall(r"^  ([a-z][a-z-]*)\b", product, re.MULTILINE))
    commands = readme_commands()
    assert ["./run", "up"] in [command[:2] for command in commands]
    for command in commands:
        name = command[1] if len(command) > 1 else "help"
        allowed = known | set(own) if command[0] == "./run" else known
        assert name in allowed or name.startswith("-"), f"README: {shlex.join(command)}"


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    assert ["./run", "test"] in readme_commands()
    script = (ROOT / ".ci" / "run").read_text()
    for command in ("./run check", "./run test"):
        assert re.search(rf"^{re.escape(command)}\b", script, re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert os.access(ROOT / "run", os.X_OK)


def test_tracked_files_hold_nothing_of_one_machine() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=15
    ).stdout.split("\0")
    found = []
    for path in (ROOT / name for name in names if name):
        if not path.is_file() or path.suffix in {".png", ".gif", ".ico", ".woff2"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [f"{path}:{number}: {line}" for rule in ELSEWHERE_WRONG if rule.search(line)]
    assert not found, "\n".join(found)


# --- containers ----------------------------------------------------------------------------------


def test_containers_publish_on_loopback_only() -> None:
    published = [
        port for service in COMPOSE["services"].values() for port in service.get("ports", [])
    ]
    assert published, "the dashboard must be reachable"
    for port in published:
        assert str(port).startswith("127.0.0.1:"), port


def test_containers_take_every_secret_from_the_environment() -> None:
    for name in SECRETS:
        uses = re.findall(rf"\$\{{?{name}\b[^}}]*\}}?", COMPOSE_TEXT)
        assert uses, name
        for use in uses:
            assert re.fullmatch(rf"\$\{{{name}:\?.+\}}", use), f"{use} lets an empty secret pass"
    literal = re.compile(r"(?i)(password|secret|key|auth)\w*:\s+(?!\$\{)[\w'\"]")
    assert not [line for line in COMPOSE_TEXT.splitlines() if literal.search(line)]


def test_containers_cover_every_process() -> None:
    services = COMPOSE["services"]
    assert services.keys() == {"redis", "postgres", *PROCESSES}
    for name, service in services.items():
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
    for name in PROCESSES:
        assert services[name]["command"][0] == name
        assert services[name]["image"] == services["app"]["image"]
    racks = load_config(ROOT / "deploy" / "run.toml").cluster.racks
    assert {rack.host for rack in racks} == {services["agent"]["hostname"]}


def test_image_does_not_run_as_root() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in {"root", "0"}


def test_docker_compose_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run(
            [docker, "compose", "version"], capture_output=True, timeout=15, check=False
        ).returncode
    ):
        pytest.skip("no docker with compose here")
    command = [docker, "compose", "--file", str(ROOT / "docker-compose.yml"), "config", "--quiet"]
    given = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    secrets = dict.fromkeys(SECRETS, "abc123")
    subprocess.run(command, env=given | secrets, check=True, timeout=15, cwd=ROOT)
    for name in SECRETS:
        partial = given | {key: value for key, value in secrets.items() if key != name}
        done = subprocess.run(
            command, env=partial, capture_output=True, text=True, timeout=15, check=False, cwd=ROOT
        )
        assert done.returncode != 0
        assert name in done.stderr
