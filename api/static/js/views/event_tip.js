/** The tip that tells of the event under the pointer. */

import { tooltipContent } from "shardplan/chart.js";
import { element } from "shardplan/dom.js";
import { seconds } from "shardplan/format.js";
import { firstAfter } from "shardplan/views/event_shapes.js";

const NEAR_PIXELS = 3;
const BESIDE = 14;

/**
 * Returns the tip's element, and `connect`, which is called with each new ECharts instance of the timeline.
 * @param {Object} time the view's `timeline`
 * @param {Array<Array>} byTrack of `eventsByTrack`
 */
export function eventTip(time, byTrack) {
  const node = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });

  function connect(instance) {
    const show = ({ offsetX, offsetY }) => {
      const point = [offsetX, offsetY];
      const event = instance.containPixel({ gridIndex: 0 }, point) ? eventAt(instance, point) : null;
      node.hidden = !event;
      if (!event) return;
      node.replaceChildren(eventText(time, event));
      const room = instance.getWidth() - node.offsetWidth;
      node.style.transform = `translate(${Math.min(offsetX + BESIDE, Math.max(0, room))}px, ${offsetY + BESIDE}px)`;
    };
    instance.getZr().on("mousemove", show);
    instance.getZr().on("globalout", () => {
      node.hidden = true;
    });
  }

  function eventAt(instance, point) {
    const [at, track] = instance.convertFromPixel({ gridIndex: 0 }, point);
    const near = NEAR_PIXELS * Math.abs(instance.convertFromPixel({ gridIndex: 0 }, [point[0] + 1, point[1]])[0] - at);
    const events = byTrack[track] ?? [];
    const next = firstAfter(events, at);
    const distance = ([, start, duration]) => Math.max(0, start - at, at - start - duration);
    const candidates = events.slice(Math.max(0, next - 2), next + 1).filter((event) => distance(event) <= near);
    return candidates.sort((one, other) => distance(one) - distance(other))[0] ?? null;
  }

  return { node, connect };
}

function eventText(time, [track, start, duration, label, kind]) {
  const rows = [
    ["track", time.tracks[track].name],
    ["kind", kind],
    ["takes", seconds(duration)],
    ["starts at", seconds(start)],
    ["ends at", seconds(start + duration)],
  ];
  return tooltipContent(time.labels[label], rows);
}
