/** Entry of the report: draws the plan whose view lies in the document. It needs no server. */

import { element } from "shardplan/dom.js";
import { planFrame } from "shardplan/plan_frame.js";
import { PLAN_VIEWS } from "shardplan/plan_views.js";
import { startTheme, themeSelect } from "shardplan/theme.js";
import { hashState } from "shardplan/url_state.js";

startTheme();
const view = JSON.parse(document.getElementById("view").textContent);
const frame = planFrame(view, {
  views: PLAN_VIEWS,
  context: { state: hashState() },
  actions: [themeSelect(), printButton()],
});
document.title = view.title;
document.getElementById("main").replaceChildren(frame.node);
frame.update();
addEventListener("hashchange", frame.update);

function printButton() {
  return element("button", { type: "button", on: { click: () => window.print() } }, "Print");
}
