/** The frame of a plan, on the server's page and in the report: title, headline, links to the views, the chosen view. */

import { element, emptyText, hiddenText } from "shardplan/dom.js";
import { priceOfStep } from "shardplan/price.js";
import { applyTheme, REDRAW, stored } from "shardplan/theme.js";

/**
 * Returns the frame of a plan.
 * @param {Object} view the plan's view, as `GET /v1/plans/{id}/view` answers it
 * @param {Object} frame
 * @param {Array<Object>} frame.views `name`, `title`, `draw(view, context)` and `keys` of the state that it depends on
 * @param {Object} frame.context what the views need beside the plan: `state`, and on the server's page `formLink`, `api`
 * @param {Array<Node>} frame.actions links and buttons beside the title
 * @returns {{node: Node, update: function()}} `update` shows the view that the state names
 */
export function planFrame(view, { views, context, actions = [] }) {
  const links = new Map(views.map(({ name, title }) => [name, element("a", {}, title)]));
  const panels = new Map(views.map((item) => [item.name, panel(item, view, context)]));

  function update() {
    const wanted = context.state.get("view");
    const name = panels.has(wanted) ? wanted : views[0].name;
    for (const [other, link] of links) {
      link.href = context.state.href({ view: other });
      if (other === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    for (const [other, { node }] of panels) node.hidden = other !== name;
    panels.get(name).draw();
    revealInRow(links.get(name));
  }

  const node = element(
    "article",
    { class: "plan" },
    element(
      "header",
      { class: "plan-head" },
      element("div", {}, element("h1", {}, view.title), element("p", { class: "quiet" }, view.subtitle)),
      element("div", { class: "actions no-print" }, actions),
    ),
    headline(view.headline ?? []),
    view.time && view.cluster
      ? priceOfStep(view.time.step_s, view.cluster.nodes * view.cluster.devices_per_node)
      : null,
    element("nav", { class: "tabs no-print", "aria-label": "Views of the plan" }, [...links.values()]),
    [...panels.values()].map((item) => item.node),
  );
  printAll(node, panels, update);
  update();
  return { node, update };
}

function panel(item, view, context) {
  const node = element("section", { class: "panel", id: `view-${item.name}`, "aria-label": item.title });
  let drawnFor = null;
  const draw = () => {
    const key = JSON.stringify((item.keys ?? []).map((name) => context.state.get(name)));
    if (key === drawnFor) return;
    drawnFor = key;
    node.replaceChildren(element("h2", {}, item.title), ...[item.draw(view, context)].flat());
  };
  return { node, draw };
}

function headline(tiles) {
  if (!tiles.length) return emptyText("This plan has no estimate.");
  const tile = (item) =>
    element(
      "div",
      { class: "tile" },
      element("dt", {}, item.label),
      element(
        "dd",
        { "data-value": item.number },
        element("strong", {}, item.value),
        hiddenText(". "),
        element("span", {}, item.note),
      ),
    );
  return element("dl", { class: "headline" }, tiles.map(tile));
}

/** Keeps the chosen link in sight where the links scroll sideways. */
function revealInRow(link) {
  const row = link.parentElement;
  if (row) row.scrollLeft = link.offsetLeft - row.clientWidth / 2;
}

/** While the page is printed, all views are shown one after another, in the light theme and with their tables open. */
function printAll(node, panels, update) {
  let opened = [];
  addEventListener("beforeprint", () => {
    if (!node.isConnected) return;
    for (const item of panels.values()) {
      item.node.hidden = false;
      item.draw();
    }
    opened = [...node.querySelectorAll("details:not([open])")];
    for (const item of opened) item.open = true;
    document.documentElement.classList.add("printing");
    applyTheme("light");
    document.dispatchEvent(new Event(REDRAW));
  });
  addEventListener("afterprint", () => {
    for (const item of opened) item.open = false;
    document.documentElement.classList.remove("printing");
    applyTheme(stored());
    update();
  });
}
