"""The files in deploy/, which nothing here can run: that they parse, agree with each other, and name what there is."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from typer.testing import CliRunner

from api.cli.main import app
from api.http.app import create_app
from api.jobs.settings import CONFIG_VARIABLE, ServerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SETTINGS = set(ServerSettings.model_fields)
KUBERNETES = "1.31"
"""The version of Kubernetes whose schemas the manifests are checked against."""


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


def test_image_has_the_cpu_build_of_torch_in_the_version_of_the_package() -> None:
    (line,) = [value for name, value in instructions() if name == "RUN" and "torch" in value]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [text for text in project["dependencies"] if re.match(r"torch\b", text)]
    words = shlex.split(line)
    assert words[words.index("--index-url") + 1] == "https://download.pytorch.org/whl/cpu"
    assert words[-1] == requirement


def test_compose_file_follows_its_schema() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(DEPLOY / "compose.yaml")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.fixture(scope="module")
def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def pods(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item["spec"]["template"]["spec"] for item in manifests if item["kind"] == "Deployment"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_kubernetes_manifests_follow_their_schema(kubernetes: list[dict[str, Any]]) -> None:
    for manifest in kubernetes:
        kubernetes_validate.validate(manifest, desired_version=KUBERNETES, strict=True)
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "shardplan"


def test_kubernetes_manifests_start_what_there_is(kubernetes: list[dict[str, Any]], tmp_path: Path) -> None:
    paths = set(create_app(ServerSettings(data_dir=tmp_path)).openapi()["paths"])
    started = []
    for pod in pods(kubernetes):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in containers(pod):
            started.append(container["args"][0])
            check_command(container["args"])
            check_variables({variable["name"] for variable in container["env"]})
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["securityContext"]["readOnlyRootFilesystem"]
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            for probe in (container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")):
                if probe is not None:
                    assert probe["httpGet"]["port"] in ports
                    assert probe["httpGet"]["path"] in paths
            for option, name in (("--port", "http"), ("--metrics-port", "metrics")):
                if option in container["args"]:
                    assert ports[name] == int(container["args"][container["args"].index(option) + 1])
    assert started == ["migrate", "serve", "worker"]


def test_kubernetes_selectors_find_their_pods(kubernetes: list[dict[str, Any]]) -> None:
    deployments = [item for item in kubernetes if item["kind"] == "Deployment"]
    for item in deployments:
        assert item["spec"]["selector"]["matchLabels"] == item["spec"]["template"]["metadata"]["labels"]
    (service,) = [item for item in kubernetes if item["kind"] == "Service"]
    labels = [item["spec"]["template"]["metadata"]["labels"] for item in deployments]
    assert [set(service["spec"]["selector"].items()) <= set(each.items()) for each in labels] == [True, False]


def test_kubernetes_secrets_are_those_that_the_file_tells_to_create(kubernetes: list[dict[str, Any]]) -> None:
    command = (DEPLOY / "kubernetes.yaml").read_text().partition("kubectl -n shardplan create secret generic ")[2]
    name, keys = command.split()[0], set(re.findall(r"--from-literal=([\w-]+)=", command))
    for pod in pods(kubernetes):
        for container in containers(pod):
            for variable in container["env"]:
                if "valueFrom" in variable:
                    reference = variable["valueFrom"]["secretKeyRef"]
                    assert (reference["name"], reference["key"] in keys) == (name, True)
                elif variable["name"] == "SHARDPLAN_FIRST_TOKEN_FILE":
                    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
                    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "first-token"]
                    (item,) = volume["secret"]["items"]
                    assert (volume["secret"]["secretName"], item["key"] in keys) == (name, True)
                    assert variable["value"] == f"{mounts['first-token']}/{item['path']}"


def test_kubernetes_gives_a_worker_the_memory_of_its_jobs(kubernetes: list[dict[str, Any]]) -> None:
    (worker,) = pods(kubernetes)[1]["containers"]
    memory = int(worker["resources"]["limits"]["memory"].removesuffix("Gi")) * 2**30
    values = {variable["name"]: variable.get("value") for variable in worker["env"]}
    assert memory > int(values["SHARDPLAN_JOB_MEMORY_BYTES"]) + 2**30


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_unit_follows_its_schema(tmp_path: Path) -> None:
    text = (DEPLOY / "shardplan.service").read_text().replace("/opt/shardplan/bin/shardplan", "/bin/true")
    unit = tmp_path / "shardplan.service"
    unit.write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(text.replace("Restart=", "Restrt="))
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0, "the check sees a wrong key"


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
