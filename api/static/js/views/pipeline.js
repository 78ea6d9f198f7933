/** Pipeline stages of a plan: their modules, time of a micro-batch and peak of memory. */

import { card, element } from "shardplan/dom.js";
import { bytes, seconds } from "shardplan/format.js";
import { table } from "shardplan/table.js";

/** Returns the card of a plan's pipeline, null where it has none. */
export function pipelineCard({ pipeline }) {
  if (!pipeline) return null;
  const columns = [
    { title: "Stage", value: (row) => row.stage, number: true },
    { title: "Modules", value: (row) => row.modules.join(", ") },
    { title: "Micro-batch", value: (row) => row.micro_batch_s, text: seconds, number: true },
    { title: "Peak", value: (row) => row.peak_bytes, text: bytes, number: true },
  ];
  const rows = (pipeline.stages ?? []).map((stage, index) => ({ ...stage, stage: index }));
  const chunks = pipeline.chunks > 1 ? `, ${pipeline.chunks} chunks per rank` : "";
  const facts = `Schedule ${pipeline.schedule}${chunks}; a stage is idle for ${seconds(pipeline.idle_s)} of a step.`;
  return card("Pipeline", element("p", {}, facts), table({ title: "Stages", columns, rows }));
}
