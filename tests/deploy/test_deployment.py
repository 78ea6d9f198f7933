"""The files in deploy/, which nothing here can run: that they parse, agree with each other, and name what there is."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from api.cli.main import app
from api.jobs.settings import CONFIG_VARIABLE, ServerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SETTINGS = set(ServerSettings.model_fields)


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, in order, with their lines joined."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1].strip()) for line in lines]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def check_command(arguments: list[str]) -> None:
    """Check that the command line takes these words: with --help after them it explains itself and does nothing."""
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0, result.output
    for option in (word for word in arguments if word.startswith("--")):
        assert option in result.output


def check_variables(names: set[str]) -> None:
    ours = {name for name in names if name.startswith("SHARDPLAN_")} - {CONFIG_VARIABLE}
    assert {name.removeprefix("SHARDPLAN_").lower() for name in ours} <= SETTINGS


def test_dockerfile_copies_what_there_is_and_starts_the_command() -> None:
    found = instructions()
    assert [name for name, _ in found].count("FROM") == 2
    for name, value in found:
        if name == "COPY" and not value.startswith("--from="):
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source
    copied = {source for name, value in found if name == "COPY" for source in value.split()[:-1]}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} <= copied
    values = dict(found)
    assert values["ENTRYPOINT"] == '["shardplan"]'
    assert values["USER"] != "root"
    check_command(yaml.safe_load(values["CMD"]))
    check_variables({word.partition("=")[0] for word in shlex.split(values["ENV"])})


def test_dockerfile_installs_the_package_with_a_solver() -> None:
    assert re.search(r"pip install .* \.$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(dependency.startswith("highspy") for dependency in project["dependencies"])
    assert project["optional-dependencies"]["highs"] == [], "an alias: `shardplan[highs]` still installs"


def test_compose_file_starts_what_there_is(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"database", "server", "worker"}
    for name in ("server", "worker"):
        service = services[name]
        check_command(service["command"])
        check_variables(set(service["environment"]))
        url = service["environment"]["SHARDPLAN_DATABASE_URL"]
        assert re.fullmatch(r"postgresql://shardplan:\$\{POSTGRES_PASSWORD:\?[^}]*\}@database/shardplan", url)
        assert set(service["depends_on"]) == {"database"}
        build = service["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(compose["volumes"])
    assert services["database"]["environment"]["POSTGRES_DB"] == "shardplan"
    assert services["database"]["healthcheck"]
    exposed = dict(instructions())["EXPOSE"]
    assert services["server"]["ports"] == [f"8000:{exposed}"]
    memory = int(services["worker"]["deploy"]["resources"]["limits"]["memory"].removesuffix("g")) * 2**30
    assert memory > int(services["worker"]["environment"]["SHARDPLAN_JOB_MEMORY_BYTES"]) + 2**30


def test_systemd_unit_starts_what_there_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    text = (DEPLOY / "shardplan.service").read_text()
    unit.read_string(text)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "shardplan"
    check_command(arguments)
    variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", text, flags=re.MULTILINE))
    check_variables(set(variables))
    assert variables["SHARDPLAN_DATA_DIR"] == f"/var/lib/{unit['Service']['StateDirectory']}"
    assert CONFIG_VARIABLE in variables


def test_settings_file_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    file = DEPLOY / "shardplan.toml"
    assert set(tomllib.loads(file.read_text())) <= SETTINGS
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    assert ServerSettings().job_memory_bytes == 8_000_000_000
    monkeypatch.setenv("SHARDPLAN_PORT", "9000")
    assert ServerSettings().port == 9000, "the environment goes before the file"
    assert ServerSettings(port=9001).port == 9001


def test_documentation_lists_every_setting_with_its_default() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    table = text.partition("| setting | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", table, flags=re.MULTILINE)[1:]
    listed = {name: value for names, values in rows for name, value in pairs(names, values)}
    assert set(listed) == SETTINGS
    for name, value in listed.items():
        default = ServerSettings.model_fields[name].default
        if isinstance(default, (int, float)):
            assert float(value) == default, name


def pairs(names: str, values: str) -> list[tuple[str, str]]:
    """Return each setting of a row with its default; one text stands for all of them where it has no commas."""
    found = re.findall(r"`(\w+)`", names)
    split = [value.strip() for value in values.split(",")]
    return list(zip(found, split if len(split) == len(found) else [values] * len(found), strict=True))


def test_help_lists_the_commands_of_the_service() -> None:
    group = typer.main.get_command(app)
    assert {"serve", "worker", "token"} <= set(group.commands)  # type: ignore[attr-defined]
