/** Charts: ECharts in an element of its own, drawn when it has a size and drawn anew when the theme changes. */

import * as echarts from "echarts";
import { resolvedColours } from "shardplan/colours.js";
import { element } from "shardplan/dom.js";
import { REDRAW } from "shardplan/theme.js";

/**
 * Returns an element with a chart. The chart is disposed of when the element leaves the page.
 * @param {Object} chart
 * @param {string} chart.label what the chart shows, for screen readers; its numbers are in a table beside it
 * @param {number} chart.height in CSS pixels
 * @param {function(Object): Object} chart.option returns ECharts' option, given `{colour, width}`
 * @param {string} [chart.renderer] "svg", or "canvas" for thousands of shapes
 * @param {function(Object)} [chart.onReady] called with each new ECharts instance
 */
export function chart({ label, height, option, renderer = "svg", onReady = () => {} }) {
  const host = element("div", { class: "chart", role: "img", "aria-label": label, style: { height: `${height}px` } });
  let instance = null;

  function draw() {
    if (!host.clientWidth) return;
    instance?.dispose();
    instance = echarts.init(host, null, { renderer });
    const colour = resolvedColours();
    instance.setOption({ ...basics(colour), ...option({ colour, width: host.clientWidth }) });
    onReady(instance);
  }

  function follow() {
    if (!host.isConnected) return stop();
    if (!instance) draw();
    else if (host.clientWidth && host.clientWidth !== instance.getWidth()) instance.resize();
  }

  function stop() {
    watcher.disconnect();
    document.removeEventListener(REDRAW, draw);
    instance?.dispose();
  }

  const watcher = new ResizeObserver(follow);
  watcher.observe(host);
  document.addEventListener(REDRAW, draw);
  return host;
}

/** Returns the look of an axis of a chart. */
export function axisLook(colour, more = {}) {
  return {
    nameTextStyle: { color: colour("--text-quiet") },
    axisLabel: { color: colour("--text-quiet"), hideOverlap: true, ...more.axisLabel },
    axisLine: { lineStyle: { color: colour("--line-strong") } },
    splitLine: { lineStyle: { color: colour("--line") } },
    ...Object.fromEntries(Object.entries(more).filter(([name]) => name !== "axisLabel")),
  };
}

/**
 * Returns a tooltip's content as an element, so that names are text and never markup.
 * @param {string} title
 * @param {Array<[string, string, string?]>} rows name, value and the colour of a mark
 */
export function tooltipContent(title, rows) {
  const mark = (fill) => element("span", { class: "mark", style: { background: fill } });
  return element(
    "div",
    { class: "tooltip" },
    element("strong", {}, title),
    rows.map(([name, value, fill]) =>
      element("div", {}, fill ? mark(fill) : null, `${name} `, element("b", {}, value)),
    ),
  );
}

function basics(colour) {
  return {
    animation: false,
    textStyle: { fontFamily: "system-ui, sans-serif", color: colour("--text") },
    tooltip: {
      backgroundColor: colour("--surface"),
      borderColor: colour("--line-strong"),
      textStyle: { color: colour("--text"), fontSize: 13 },
      confine: true,
    },
  };
}
