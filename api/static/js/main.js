/** Entry of the server's page: opens the page that the URL names, and the next one when a link is followed. */

import { client } from "shardplan/api.js";
import { element } from "shardplan/dom.js";
import { devicesPage } from "shardplan/pages/devices.js";
import { jobPage } from "shardplan/pages/job.js";
import { newPlanPage } from "shardplan/pages/new_plan.js";
import { plansPage } from "shardplan/pages/plans.js";
import { problemBox } from "shardplan/pages/problem_box.js";
import { tokenDialog } from "shardplan/pages/token.js";
import { startTheme, themeSelect } from "shardplan/theme.js";
import { queryState } from "shardplan/url_state.js";

const main = document.getElementById("main");
const token = tokenDialog();
const api = client(token.ask);
const context = { api, navigate, state: queryState(navigate) };
let shown = { path: null };

startTheme();
document.getElementById("tools").append(themeSelect(), token.button);
document.body.append(token.dialog);
document.addEventListener("click", followLink);
addEventListener("popstate", () => open());
open();

function pageOf(path) {
  if (path === "/") return newPlanPage;
  if (path === "/plans") return plansPage;
  if (path === "/devices") return devicesPage;
  const job = path.match(/^\/plans\/([^/]+)$/);
  return job ? (own) => jobPage(own, job[1]) : null;
}

/** Opens a URL of this page; `replace` leaves no entry in the history. */
function navigate(url, { replace = false, again = false } = {}) {
  if (replace) history.replaceState(null, "", url);
  else history.pushState(null, "", url);
  open({ again });
}

/** Shows the page of the present URL; a page that can is updated, unless it is to be opened `again`. */
async function open({ again = false } = {}) {
  const path = location.pathname;
  if (path === shown.path && shown.update && !again) return shown.update();
  const first = shown.path === null;
  shown.stop?.();
  shown = { path };
  const opening = shown;
  markCurrentLink(path);
  const loading = setTimeout(
    () => main.replaceChildren(element("p", { class: "loading", role: "status" }, "Loading\u2026")),
    150,
  );
  const page = await built(path);
  clearTimeout(loading);
  if (shown !== opening) return page.stop?.();
  Object.assign(shown, page);
  document.title = `${page.title} \u2013 shardplan`;
  main.replaceChildren(page.node);
  page.update?.();
  if (!first) focusHeading();
}

async function built(path) {
  try {
    const make = pageOf(path);
    if (!make) return errorPage("Not found", { title: "There is no such page", detail: path });
    return await make(context);
  } catch (error) {
    const retry = element("button", { type: "button", on: { click: () => open({ again: true }) } }, "Try again");
    return errorPage("Error", error, retry);
  }
}

function errorPage(title, error, ...actions) {
  return { title, node: element("div", {}, element("h1", {}, title), problemBox(error, ...actions)) };
}

function followLink(event) {
  const link = event.target.closest?.("a[href]");
  if (
    !link ||
    event.defaultPrevented ||
    event.button ||
    event.ctrlKey ||
    event.metaKey ||
    event.shiftKey ||
    event.altKey
  )
    return;
  if (
    link.download ||
    link.target ||
    link.origin !== location.origin ||
    link.getAttribute("href").startsWith("#") ||
    !pageOf(link.pathname)
  )
    return;
  event.preventDefault();
  navigate(link.href);
}

function markCurrentLink(path) {
  for (const link of document.querySelectorAll("#pages a")) {
    if (link.pathname === path) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function focusHeading() {
  const heading = main.querySelector("h1");
  heading?.setAttribute("tabindex", "-1");
  heading?.focus({ preventScroll: true });
  scrollTo(0, 0);
}
