"""The page in a real browser against a real server: from the empty form to a plan, through every view, and back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.drawn_plans import drawn_plan
from support.serving import Server
from support.small_models import TINY_REQUEST

from api.view.report import report_html
from planner.plan.job_spec import spec_fields
from planner.plan.sharding_plan import ShardingPlan

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")

VIEWS = ("overview", "memory", "timeline", "layouts", "ops", "communication", "meshes")
ON_THE_SERVER = (*VIEWS, "compare", "sweep", "what-if")
WIDTHS = (1440, 768, 390)
PLANNED_S = 300_000
HOSTILE = "<img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def watched() -> list[str]:
    """Return what no page of this file may do: errors of the console, uncaught ones, requests to other hosts."""
    return []


@pytest.fixture
def page(browser: Browser, server: Server, watched: list[str]) -> Iterator[Page]:
    watched.clear()
    opened = new_page(browser, server.url, watched)
    yield opened
    opened.context.close()
    assert not watched


def new_page(browser: Browser, url: str, watched: list[str], **options: Any) -> Page:
    opened = browser.new_context(viewport={"width": 1440, "height": 900}, **options).new_page()

    def said(message: Any) -> None:
        # A 422 that the form shows at its field is also a line of the browser's console.
        if message.type in ("error", "warning") and "status of 422" not in message.text:
            watched.append(message.text)

    def asked(request: Any) -> None:
        if not request.url.startswith((url, "data:", "blob:", "file:")):
            watched.append(f"asked {request.url}")

    opened.on("console", said)
    opened.on("pageerror", lambda error: watched.append(str(error)))
    opened.on("request", asked)
    return opened


@pytest.fixture(scope="module")
def planned(server: Server) -> dict[str, Any]:
    """Return the view of a small plan that the server has made."""
    answer = httpx2.post(f"{server.url}/v1/plans", json=TINY_REQUEST, timeout=30).raise_for_status()
    job = server.until_ended(answer.json()["id"])
    view: dict[str, Any] = httpx2.get(f"{server.url}/v1/plans/{job['id']}/view").raise_for_status().json()
    return view


def show(page: Page, server: Server, id: str, view: str) -> None:
    page.goto(f"{server.url}/plans/{id}?view={view}")
    expect(page.locator(f"#view-{view}")).to_be_visible()
    page.wait_for_load_state("networkidle")


def fits(page: Page) -> bool:
    """Return whether the page needs no sideways scrolling, once charts have taken a new width."""
    for _ in range(30):
        if page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"):
            return True
        page.wait_for_timeout(100)
    return False


def serious(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html'][:150]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_from_the_empty_form_to_a_plan_of_llama_70b(page: Page, server: Server, tmp_path: Path) -> None:
    page.goto(server.url)
    page.get_by_label("Named model").select_option("llama-3.1-70b")
    page.get_by_label("Nodes", exact=True).fill("8")
    page.get_by_role("radio", name="h100-sxm-80gb").check()
    page.get_by_label("Batch", exact=True).fill("256")
    page.get_by_label("Sequence", exact=True).fill("4096")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.wait_for_url("**/plans/*")
    expect(page.get_by_role("heading", level=1)).to_contain_text("llama-3.1-70b", timeout=PLANNED_S)
    expect(page.locator("#view-overview")).to_be_visible(timeout=PLANNED_S)
    id = page.url.rpartition("/")[2].partition("?")[0]
    plan = httpx2.get(f"{server.url}/v1/plans/{id}").json()["plan"]
    assert plan["estimate"]["step_time_s"] == pytest.approx(
        float(page.locator("dd[data-value]").first.get_attribute("data-value") or "nan")
    )
    page.get_by_label("Price of a device").fill("2.5")
    dollars = float(page.locator(".price output").get_attribute("data-value") or "nan")
    assert dollars == pytest.approx(plan["estimate"]["step_time_s"] * 64 * 2.5 / 3600)
    for view in ON_THE_SERVER:
        page.locator("nav.tabs").get_by_role("link", name=view.replace("-", " "), exact=False).first.click()
        expect(page.locator(f"#view-{view}")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="plan.json").or_(page.get_by_role("button", name="plan.json")).click()
    file = tmp_path / "plan.json"
    download.value.save_as(file)
    assert ShardingPlan.load(file) == ShardingPlan.from_dict(plan)
    for name in ("report", "trace"):
        with page.expect_download() as download:
            page.get_by_role("link", name=name).or_(page.get_by_role("button", name=name)).first.click()
        assert download.value.path().stat().st_size > 10_000


@pytest.mark.parametrize("view", VIEWS)
def test_every_number_of_a_table_is_the_plans(page: Page, server: Server, planned: dict[str, Any], view: str) -> None:
    """Numbers that tables show can be read back exactly, and are members of the plan's view, or sums of them."""
    show(page, server, planned["id"], view)
    cells = page.locator(f"#view-{view} td[data-value]")
    shown = {float(text) for text in cells.evaluate_all("cells => cells.map(cell => cell.dataset.value)") if text}
    expected = {
        "communication": {each["time_s"] for each in planned["collectives"]},
        "memory": {float(each["bytes"]) for each in planned["memory"]["roles"]},
        "meshes": {each["step_s"] for each in planned["meshes"] if each["step_s"] is not None},
        "ops": set(),
        "layouts": {float(each["bytes"]) for each in planned["parameters"] if each["bytes"]},
        "timeline": {each["seconds"] for each in planned["timeline"]["tracks"]},
        "overview": {each["seconds"] for each in planned["time"]["parts"]},
    }[view]
    missing = [value for value in expected if not any(other == pytest.approx(value, rel=1e-9) for other in shown)]
    assert not missing


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_have_no_serious_fault_of_accessibility_and_fit_every_width(
    browser: Browser, server: Server, planned: dict[str, Any], scheme: str, watched: list[str]
) -> None:
    watched.clear()
    page = new_page(browser, server.url, watched, color_scheme=scheme)
    faults = {}
    for view in ON_THE_SERVER:
        show(page, server, planned["id"], view)
        faults[view] = serious(page)
        for width in WIDTHS if scheme == "light" else ():
            page.set_viewport_size({"width": width, "height": 900})
            faults[f"{view} at {width}"] = [] if fits(page) else ["the page scrolls sideways"]
        page.set_viewport_size({"width": 1440, "height": 900})
    for address in ("/", "/plans", "/devices"):
        page.goto(server.url + address)
        page.wait_for_load_state("networkidle")
        faults[address] = serious(page)
    page.context.close()
    assert not {name: found for name, found in faults.items() if found}
    assert not watched


def test_what_if_plans_again_and_compares(page: Page, server: Server, planned: dict[str, Any]) -> None:
    show(page, server, planned["id"], "what-if")
    panel = page.locator("#view-what-if")
    panel.get_by_label("Batch", exact=True).fill("16")
    panel.get_by_role("button", name="Plan again").click()
    page.wait_for_url(f"**/plans/*compare={planned['id']}*", timeout=PLANNED_S)
    expect(page.locator("#view-compare")).to_contain_text("batch", timeout=PLANNED_S)


def test_faults_are_said_at_the_field(page: Page, server: Server) -> None:
    page.goto(server.url)
    batch = page.get_by_label("Batch", exact=True)
    batch.fill("0")
    page.get_by_role("button", name="Plan", exact=True).click()
    assert batch.get_attribute("aria-invalid") == "true"
    batch.fill("6")
    page.get_by_label("Named model").select_option("llama-3.1-8b")
    page.get_by_text("Advanced").click()
    page.get_by_label("Mesh", exact=True).fill("dp=3")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.get_by_text("3 devices")).to_be_visible()
    assert page.url.rstrip("/") == server.url


def test_the_forms_fields_are_those_of_a_request(page: Page, server: Server) -> None:
    page.goto(server.url)
    fields: list[dict[str, Any]] = page.evaluate(
        "import('shardplan/pages/job_fields.js').then(m => [m.JOB_FIELDS, m.LIMIT_FIELDS, m.ADVANCED_FIELDS].flat())"
    )
    specs = {item.name: item for item in spec_fields() if item.option.in_requests and item.name != "cluster"}
    assert {field["name"] for field in fields} == set(specs)
    for field in fields:
        spec = specs[field["name"]]
        limits = spec.option.limits
        for name, limit in (("min", "ge"), ("max", "le"), ("above", "gt")):
            assert field.get(name) == limits.get(limit), f"{field['name']}: {name}"
        if "standard" in field:
            assert field["standard"] == spec.default, field["name"]
        if spec.choices and spec.name != "techniques":
            assert field["options"] == list(spec.choices)


def test_everything_is_reached_by_the_keyboard(page: Page, server: Server, planned: dict[str, Any]) -> None:
    show(page, server, planned["id"], "layouts")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.trim()"))
    assert {"plan.json", "report", "trace", "Timeline", "Compare", "Pin"} <= reached
    page.locator("nav.tabs a").nth(2).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#view-timeline")).to_be_visible()


def test_hostile_names_stay_text(page: Page, server: Server) -> None:
    cluster = {"nodes": 1, "devices_per_node": 4, "device": {"like": "toy", "name": HOSTILE}}
    answer = httpx2.post(f"{server.url}/v1/plans", json={**TINY_REQUEST, "cluster": cluster}, timeout=30)
    job = server.until_ended(answer.raise_for_status().json()["id"])
    assert job["status"] == "succeeded", job["error"]
    for view in ON_THE_SERVER:
        show(page, server, job["id"], view)
    page.goto(f"{server.url}/plans")
    expect(page.get_by_text(HOSTILE[:20], exact=False).first).to_be_visible()
    assert page.evaluate("window.hacked === undefined && !document.querySelector('img[src=x]')")


def test_no_script_of_another_page_runs(page: Page, server: Server, watched: list[str]) -> None:
    page.goto(server.url)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<button onclick=\"window.hacked=1\">x</button>')")
    page.evaluate(
        "document.head.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 2'}))"
    )
    page.get_by_role("button", name="x", exact=True).dispatch_event("click")
    assert page.evaluate("window.hacked === undefined")
    assert len([each for each in watched if "Content Security Policy" in each]) == 2
    watched.clear()


def test_a_token_is_asked_for(browser: Browser, run_server: Any, tmp_path: Path, watched: list[str]) -> None:
    watched.clear()
    first = tmp_path / "first-token"
    token = "sp_" + "a" * 43
    first.write_text(token)
    guarded = run_server(tmp_path / "data", SHARDPLAN_FIRST_TOKEN_FILE=str(first))
    page = new_page(browser, guarded.url, watched)
    page.goto(f"{guarded.url}/plans")
    field = page.get_by_role("dialog").locator("input")
    field.fill(token)
    field.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_text("valid API token")).to_have_count(0)
    page.context.close()
    assert not [each for each in watched if "401" not in each]


def test_the_report_opens_from_a_file(browser: Browser, tmp_path: Path, watched: list[str]) -> None:
    watched.clear()
    file = tmp_path / "plan.html"
    file.write_text(report_html(drawn_plan("interleaved")), encoding="utf-8")
    page = new_page(browser, "file:", watched)
    page.goto(file.as_uri())
    for view in VIEWS:
        page.locator("nav.tabs").get_by_role("link", name=view, exact=False).first.click()
        expect(page.locator(f"#view-{view}")).to_be_visible()
    page.context.close()
    assert not watched
