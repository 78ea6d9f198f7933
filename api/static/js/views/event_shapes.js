/** Events of a timeline as rectangles, at most about one per pixel of a lane, so that 20,000 of them zoom smoothly. */

import { axisVariable, timeVariable } from "shardplan/colours.js";

const LEAST_WIDTH = 0.7;
const LABEL_WIDTH = 60;

/**
 * Returns ECharts' custom series of the events. The last member of each datum is the event's index.
 * @param {Object} time the view's `timeline`
 * @param {Map<string, string>} roles role of each axis
 * @param {function(string): string} colour colour of a CSS variable
 */
export function eventShapes(time, roles, colour) {
  const order = time.events.map((_, index) => index).sort((one, other) => time.events[one][0] - time.events[other][0] || time.events[one][1] - time.events[other][1]);
  const data = order.map((index) => {
    const [lane, start, duration] = time.events[index];
    return [start, lane, start + duration, duration, index];
  });
  const text = colour("--on-time");
  let [lastLane, lastEnd] = [-1, -Infinity];

  function shape(params, api) {
    const [left, top] = api.coord([api.value(0), api.value(1)]);
    const right = api.coord([api.value(2), api.value(1)])[0];
    const { x, width: room } = params.coordSys;
    const lane = api.value(1);
    if (lane !== lastLane || params.dataIndex === 0) [lastLane, lastEnd] = [lane, -Infinity];
    if (right < x || left > x + room || right - lastEnd < LEAST_WIDTH) return null;
    const from = Math.max(left, x);
    const width = Math.max(LEAST_WIDTH, Math.min(right, x + room) - from);
    lastEnd = from + width;
    const height = api.size([0, 1])[1] * 0.72;
    const [, , , label, kind] = time.events[api.value(4)];
    const drawn = {
      type: "rect",
      shape: { x: from, y: top - height / 2, width, height },
      style: { ...look(time.lanes[lane], kind, roles, colour), stroke: width > 4 ? colour("--surface") : null, lineWidth: width > 4 ? 0.5 : 0 },
    };
    if (width < LABEL_WIDTH) return drawn;
    const content = { type: "text", style: { text: time.labels[label], fill: text, font: "11px system-ui, sans-serif", width: width - 8, overflow: "truncate" } };
    return { ...drawn, textContent: content, textConfig: { position: "insideLeft", distance: 4 } };
  }

  return { type: "custom", clip: true, renderItem: shape, data, encode: { x: [0, 2], y: 1 }, dimensions: ["start", "lane", "end", "duration", "event"], progressive: 0 };
}

function look(lane, kind, roles, colour) {
  if (lane.axis == null) return { fill: colour(timeVariable(kind)) };
  return { fill: colour(axisVariable(roles.get(lane.axis))), opacity: kind === "overlapped" ? 0.45 : 1 };
}
