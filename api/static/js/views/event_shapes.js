/** Events of a timeline as rectangles: one shape per track and colour, so that 20,000 events zoom smoothly. */

import * as echarts from "echarts";
import { axisVariable, timeVariable } from "shardplan/colours.js";

const LEAST_WIDTH = 0.6;
const GAP_FROM = 4;
const TOUCHING = 0.3;
const LABEL_WIDTH = 60;
const TRACK_SHARE = 0.72;

const Rectangles = echarts.graphic.extendShape({
  shape: { y: 0, height: 0, spans: [] },
  buildPath(path, { y, height, spans }) {
    for (const [x, width] of spans) path.rect(x, y, width, height);
  },
});
echarts.graphic.registerShape("rectangles", Rectangles);

/** Returns the events of each track, in the order of their start. */
export function eventsByTrack(time) {
  const tracks = time.tracks.map(() => []);
  for (const event of time.events) tracks[event[0]].push(event);
  for (const events of tracks) events.sort((one, other) => one[1] - other[1]);
  return tracks;
}

/** Returns the index of the first event that starts after `at`, in seconds. */
export function firstAfter(events, at) {
  let [low, high] = [0, events.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (events[middle][1] > at) high = middle;
    else low = middle + 1;
  }
  return low;
}

/**
 * Returns ECharts' custom series of the events, with one datum per track.
 * @param {Object} time the view's `timeline`
 * @param {Array<Array>} byTrack of `eventsByTrack`
 * @param {Map<string, string>} roles role of each axis
 * @param {function(string): string} colour colour of a CSS variable
 */
export function eventShapes(time, byTrack, roles, colour) {
  const text = colour("--on-time");

  function shape(params, api) {
    const track = params.dataIndex;
    const [origin, middle] = api.coord([0, track]);
    const scale = api.coord([time.step_s, track])[0] - origin;
    const { x: left, width: room } = params.coordSys;
    const height = api.size([0, 1])[1] * TRACK_SHARE;
    const y = middle - height / 2;
    const pixel = (at) => origin + (at / time.step_s) * scale;
    const { spans, labels } = visible(byTrack[track], pixel, left, left + room);
    const blocks = [...spans].map(([kind, own]) => ({
      type: "rectangles",
      silent: true,
      shape: { y, height, spans: own },
      style: look(time.tracks[track], kind, roles, colour),
    }));
    const captions = labels.map(([x, width, label]) => ({
      type: "text",
      silent: true,
      x: x + 4,
      y: middle,
      style: {
        text: time.labels[label],
        fill: text,
        font: "11px system-ui, sans-serif",
        verticalAlign: "middle",
        width: width - 8,
        overflow: "truncate",
      },
    }));
    return { type: "group", children: [...blocks, ...captions] };
  }

  const data = time.tracks.map((_, track) => [0, track, time.step_s]);
  return {
    type: "custom",
    clip: true,
    silent: true,
    renderItem: shape,
    data,
    encode: { x: [0, 2], y: 1 },
    tooltip: { show: false },
  };
}

/**
 * Returns what of a track can be seen between two pixels: for each kind its spans `[x, width]`, and the labels of wide
 * events. An event that ends within the pixel of the one before is left out.
 */
function visible(events, pixel, left, right) {
  const spans = new Map();
  const labels = [];
  let drawnTo = -Infinity;
  for (const [, start, duration, label, kind] of events) {
    const [from, to] = [Math.max(left, pixel(start)), Math.min(right, pixel(start + duration))];
    if (from > right) break;
    if (to < left || to - drawnTo < LEAST_WIDTH) continue;
    const width = Math.max(LEAST_WIDTH, to - from);
    addSpan(spans, kind, from, width);
    if (width >= LABEL_WIDTH) labels.push([from, width, label]);
    drawnTo = from + width;
  }
  return { spans, labels };
}

/** Adds a span to those of its kind; narrow spans that touch become one, which is drawn faster. */
function addSpan(spans, kind, from, width) {
  const own = spans.get(kind) ?? [];
  spans.set(kind, own);
  const last = own.at(-1);
  if (last && width <= GAP_FROM && from - last[0] - last[1] < TOUCHING) last[1] = from + width - last[0];
  else own.push([from, width > GAP_FROM ? width - 0.5 : width]);
}

function look(track, kind, roles, colour) {
  if (track.axis == null) return { fill: colour(timeVariable(kind)) };
  return { fill: colour(axisVariable(roles.get(track.axis))), opacity: kind === "overlapped" ? 0.45 : 1 };
}
