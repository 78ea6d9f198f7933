/** Buttons, keys and drags that zoom a chart's time axis. */

import { element } from "shardplan/dom.js";

/**
 * Returns the controls of a chart over `whole` seconds.
 * @returns {{node: Node, region: function(Array<Node>): Node, connect: function(Object)}} `node`: the buttons; `region` wraps
 *   the chart in an element that takes keys; `connect` is called with each new ECharts instance
 */
export function zoomControls(whole) {
  let instance = null;

  function connect(chart) {
    instance = chart;
    chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
  }

  function shownWindow() {
    const { startValue, endValue } = instance.getOption().dataZoom[0];
    return [startValue ?? 0, endValue ?? whole];
  }

  function show(from, to) {
    const width = Math.min(whole, Math.max(whole * 1e-6, to - from));
    const startValue = Math.min(Math.max(0, from), whole - width);
    instance.dispatchAction({ type: "dataZoom", startValue, endValue: startValue + width });
  }

  const zoom = (factor) => {
    const [from, to] = shownWindow();
    const [middle, half] = [(from + to) / 2, ((to - from) * factor) / 2];
    show(middle - half, middle + half);
  };
  const move = (share) => {
    const [from, to] = shownWindow();
    show(from + share * (to - from), to + share * (to - from));
  };
  const actions = {
    "+": () => zoom(0.5),
    "-": () => zoom(2),
    ArrowLeft: () => move(-0.25),
    ArrowRight: () => move(0.25),
    0: () => show(0, whole),
  };
  const button = (text, label, act) =>
    element(
      "button",
      { type: "button", class: "quiet", "aria-label": label, on: { click: () => instance && act() } },
      text,
    );
  const node = element(
    "div",
    { class: "zoom no-print" },
    button("+", "Zoom in", actions["+"]),
    button("\u2212", "Zoom out", actions["-"]),
    button("\u2190", "Earlier", actions.ArrowLeft),
    button("\u2192", "Later", actions.ArrowRight),
    button("Whole step", "Show the whole step", actions[0]),
    element("span", { class: "quiet" }, "Drag to zoom, or use the wheel."),
  );

  function region(content) {
    const pressed = (event) => {
      if (!instance || !(event.key in actions) || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      actions[event.key]();
    };
    const label = "Timeline; plus and minus zoom, arrow keys move, 0 shows the whole step";
    return element(
      "div",
      { class: "zoomable", role: "group", tabindex: "0", "aria-label": label, on: { keydown: pressed } },
      content,
    );
  }

  return { node, region, connect };
}
