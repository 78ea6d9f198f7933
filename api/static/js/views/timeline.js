/** Timeline of a step: tracks of events that zoom, and the memory under them on the same time axis. */

import { legend } from "shardplan/bars.js";
import { axisLook, chart } from "shardplan/chart.js";
import { axisRoles, axisVariable, timeVariable } from "shardplan/colours.js";
import { card, element, emptyText } from "shardplan/dom.js";
import { percent, seconds, whole } from "shardplan/format.js";
import { table } from "shardplan/table.js";
import { eventsByTrack, eventShapes } from "shardplan/views/event_shapes.js";
import { eventTip } from "shardplan/views/event_tip.js";
import { areaTooltip, memoryAreas } from "shardplan/views/memory.js";
import { zoomControls } from "shardplan/views/zoom_controls.js";

export const timeline = { name: "timeline", title: "Timeline", draw };

const TRACK_HEIGHT = 34;
const MEMORY_HEIGHT = 130;

function draw(view) {
  const { timeline: time } = view;
  if (!time?.events?.length) return emptyText("This plan has no timeline.");
  return [
    time.note ? element("p", {}, time.note) : null,
    card("One step", drawing(view), legend(meanings(view))),
    trackTable(time),
    labelTable(time),
  ].filter(Boolean);
}

function drawing(view) {
  const { timeline: time, memory } = view;
  const hasMemory = (memory?.curve?.length ?? 0) > 1;
  const tracksHeight = time.tracks.length * TRACK_HEIGHT;
  const height = 16 + tracksHeight + (hasMemory ? MEMORY_HEIGHT + 36 : 0) + 76;
  const controls = zoomControls(time.step_s);
  const byTrack = eventsByTrack(time);
  const tip = eventTip(time, byTrack);
  const option = ({ colour, width }) => {
    const left = width < 500 ? 70 : 110;
    const grids = [{ left, right: 16, top: 8, height: tracksHeight }];
    if (hasMemory) grids.push({ left, right: 16, top: 8 + tracksHeight + 36, height: MEMORY_HEIGHT });
    return {
      grid: grids,
      tooltip: {
        trigger: "item",
        backgroundColor: colour("--surface"),
        borderColor: colour("--line-strong"),
        textStyle: { color: colour("--text"), fontSize: 13 },
        confine: true,
      },
      toolbox: {
        show: true,
        itemSize: 0,
        left: -50,
        feature: { dataZoom: { yAxisIndex: "none", title: { zoom: "", back: "" } } },
      },
      xAxis: grids.map((_, index) => timeAxis(index, time.step_s, colour)),
      yAxis: [
        trackAxis(time.tracks, left, colour),
        axisLook(colour, { type: "value", gridIndex: 1, splitNumber: 3, axisLabel: { formatter: memoryLabel } }),
      ].slice(0, grids.length),
      dataZoom: [
        { type: "inside", xAxisIndex: grids.map((_, index) => index), filterMode: "none", moveOnMouseMove: "shift" },
        {
          type: "slider",
          xAxisIndex: grids.map((_, index) => index),
          filterMode: "none",
          bottom: 8,
          height: 22,
          left,
          right: 16,
          showDataShadow: false,
          brushSelect: false,
          labelFormatter: seconds,
          borderColor: colour("--line"),
          textStyle: { color: colour("--text-quiet") },
        },
      ],
      series: [
        eventShapes(time, byTrack, axisRoles(view), colour),
        ...(hasMemory
          ? memoryAreas(memory, colour, { xAxisIndex: 1, yAxisIndex: 1, tooltip: areaTooltip(memory, colour) })
          : []),
      ],
    };
  };
  const label = `Timeline of one step with ${whole(time.events.length)} events in ${time.tracks.length} tracks; the tables below have the totals`;
  const onReady = (instance) => {
    controls.connect(instance);
    tip.connect(instance);
  };
  return [controls.node, controls.region([chart({ label, height, option, renderer: "canvas", onReady }), tip.node])];
}

function timeAxis(index, step, colour) {
  const look = {
    type: "value",
    gridIndex: index,
    min: 0,
    max: step,
    axisLabel: { formatter: seconds, showMinLabel: true },
    splitNumber: 6,
  };
  return axisLook(colour, look);
}

function trackAxis(tracks, width, colour) {
  const axisLabel = {
    interval: 0,
    hideOverlap: false,
    width: width - 12,
    overflow: "truncate",
    color: colour("--text"),
  };
  return axisLook(colour, {
    type: "category",
    inverse: true,
    data: tracks.map((track) => track.name),
    axisLabel,
    axisTick: { show: false },
  });
}

function memoryLabel(amount) {
  return `${Math.round(amount / 1e9)} GB`;
}

function meanings(view) {
  const { tracks, events } = view.timeline;
  const kinds = new Set(events.filter(([track]) => !tracks[track].axis).map((event) => event[4]));
  const axes = tracks.filter((track) => track.axis);
  const roles = axisRoles(view);
  return [
    ...[...kinds].map((kind) => ({
      name: kind === "exposed" ? "waits for communication" : kind,
      variable: timeVariable(kind),
    })),
    ...axes.map((track) => ({
      name: `communication on ${track.axis}; paler where overlapped`,
      variable: axisVariable(roles.get(track.axis)),
    })),
  ];
}

function trackTable(time) {
  const columns = [
    { title: "Track", value: (row) => row.name },
    { title: "Kind", value: (row) => row.kind },
    { title: "Seconds", value: (row) => row.seconds, text: seconds, number: true },
    {
      title: "Share of the step",
      value: (row) => (time.step_s ? row.seconds / time.step_s : null),
      text: percent,
      number: true,
    },
    { title: "Events", value: (row) => row.events, text: whole, number: true },
  ];
  const counts = new Map();
  for (const [track] of time.events) counts.set(track, (counts.get(track) ?? 0) + 1);
  return table({
    title: "Tracks",
    columns,
    rows: time.tracks.map((track, index) => ({ ...track, events: counts.get(index) ?? 0 })),
  });
}

/** Returns the table of events; those of equal names but for the numbers of blocks are one row. */
function labelTable(time) {
  const names = time.labels.map((label) => label.replace(/\.\d+(?!\w)/g, ".*"));
  const totals = new Map();
  for (const [track, , duration, label, kind] of time.events) {
    const key = `${track} ${names[label]} ${kind}`;
    const total = totals.get(key) ?? {
      track: time.tracks[track].name,
      label: names[label],
      kind,
      events: 0,
      seconds: 0,
    };
    total.events += 1;
    total.seconds += duration;
    totals.set(key, total);
  }
  const columns = [
    { title: "Event", value: (row) => row.label },
    { title: "Track", value: (row) => row.track },
    { title: "Kind", value: (row) => row.kind },
    { title: "Times", value: (row) => row.events, text: whole, number: true },
    { title: "Seconds in all", value: (row) => row.seconds, text: seconds, number: true },
  ];
  const rows = [...totals.values()].sort((one, other) => other.seconds - one.seconds);
  return table({ title: "Events, the longest in all first", columns, rows, limit: 20 });
}
