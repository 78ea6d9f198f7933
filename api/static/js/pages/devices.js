/** The catalogue of devices as cards. */

import { element } from "shardplan/dom.js";
import { bytes, flops } from "shardplan/format.js";
import { table } from "shardplan/table.js";

/** Returns the page of all devices that a cluster can be made of. */
export async function devicesPage({ api }) {
  const { devices } = await api.get("/v1/clusters");
  return {
    title: "Devices",
    node: element(
      "div",
      {},
      element("h1", {}, "Devices"),
      element(
        "p",
        { class: "quiet" },
        "A cluster is NODESxDEVICESxNAME, such as 4x8xh100-sxm-80gb. Rates are peaks; the cost model applies measured efficiencies.",
      ),
      element("div", { class: "cards devices-page" }, devices.map(deviceCard)),
      deviceTable(devices),
    ),
  };
}

function deviceCard(device) {
  const fact = (name, text) => element("div", {}, element("dt", {}, name), element("dd", {}, text));
  return element(
    "section",
    { class: "card" },
    element("h2", {}, device.name),
    element(
      "dl",
      { class: "facts" },
      fact("Memory", bytes(device.memory_bytes)),
      fact("Bandwidth", `${bytes(device.memory_bandwidth_bytes_per_s)}/s`),
      Object.entries(device.peak_flops).map(([dtype, rate]) => fact(dtype, flops(rate, "FLOP/s"))),
      fact("Inside a node", device.intra_node),
      fact("Between nodes", device.inter_node),
    ),
    element(
      "a",
      { class: "button quiet", href: `/?cluster=1x8x${encodeURIComponent(device.name)}` },
      "Plan on 8 of them",
    ),
  );
}

function deviceTable(devices) {
  const dtypes = [...new Set(devices.flatMap((device) => Object.keys(device.peak_flops)))];
  const columns = [
    { title: "Device", value: (row) => row.name },
    { title: "Kind", value: (row) => row.kind },
    { title: "Memory", value: (row) => row.memory_bytes, text: bytes, number: true },
    {
      title: "Bandwidth",
      value: (row) => row.memory_bandwidth_bytes_per_s,
      text: (value) => `${bytes(value)}/s`,
      number: true,
    },
    ...dtypes.map((dtype) => ({
      title: dtype,
      value: (row) => row.peak_flops[dtype] ?? null,
      text: (value) => flops(value, "FLOP/s"),
      number: true,
    })),
    { title: "Inside a node", value: (row) => row.intra_node },
    { title: "Between nodes", value: (row) => row.inter_node },
  ];
  return table({ title: "All devices", level: 2, columns, rows: devices });
}
