/** The fields of a planning request beyond its model and cluster: name, label, type, limits. They mirror `JobSpec`. */

const COUNT = { type: "integer", min: 1, max: 2 ** 31 };
const DTYPES = ["bf16", "fp16", "fp32"];
const OPTIMIZERS = [
  "adamw",
  "adam",
  "sgd",
  "sgd-momentum",
  "adagrad",
  "muon",
  "adamw-8bit",
  "adafactor",
  "adamw-8bit-bnb",
];
const CHECKPOINTING = {
  pattern: /^(none|(selective|full)(:[1-9][0-9]{0,3})?|full:[1-9][0-9]{0,3},selective)$/,
  wrong: "Write none, selective, full or full:8.",
};
const TECHNIQUES = [
  "auto",
  "fused-ops",
  "fused-projections",
  "zigzag",
  "reallgather",
  "async-tp",
  "flash3",
  "heterogeneous-blocks",
];

/** What a step computes. */
export const JOB_FIELDS = [
  { name: "batch", label: "Batch", hint: "samples in the global batch", ...COUNT },
  { name: "seq", label: "Sequence", hint: "tokens", ...COUNT },
  { name: "phase", label: "Phase", type: "choice", options: ["training", "prefill", "decode"], standard: "training" },
  {
    name: "ac",
    label: "Checkpointing",
    hint: "of activations; empty: chosen",
    type: "text",
    suggestions: ["none", "selective", "full"],
    ...CHECKPOINTING,
  },
  { name: "optimizer", label: "Optimizer", type: "choice", options: OPTIMIZERS, standard: "adamw" },
  { name: "dtype", label: "Compute dtype", type: "choice", options: DTYPES, standard: "bf16" },
];

/** What a plan must keep to. */
export const LIMIT_FIELDS = [
  {
    name: "memory_gb",
    label: "Memory cap",
    hint: "GB per device; empty: its memory less the headroom",
    type: "number",
    above: 0,
    max: 1e6,
  },
  { name: "pins", label: "Pins", hint: "one a line, such as lm_head.weight=S(0)@tp", type: "lines", wide: true },
];

/** The rest, behind a disclosure. */
export const ADVANCED_FIELDS = [
  { name: "mesh", label: "Mesh", hint: "such as dp=2,tp=8; empty: all meshes are tried", type: "text" },
  { name: "axes", label: "Most axes of a mesh", type: "integer", min: 1, max: 3, standard: 2 },
  { name: "micro_batches", label: "Micro-batches", hint: "per step; empty: chosen", ...COUNT },
  {
    name: "headroom",
    label: "Headroom",
    hint: "fraction of memory that stays free without a cap",
    type: "number",
    min: 0,
    max: 0.9,
    standard: 0.08,
  },
  {
    name: "tolerance",
    label: "Tolerance",
    hint: "relative step time that a simpler plan may cost",
    type: "number",
    min: 0,
    max: 1,
    standard: 0.02,
  },
  {
    name: "reduce_dtype",
    label: "Reduction dtype",
    hint: "of gradients",
    type: "choice",
    options: DTYPES,
    standard: "fp32",
  },
  {
    name: "expert_imbalance",
    label: "Expert imbalance",
    hint: "tokens of the busiest rank over the mean",
    type: "number",
    min: 1,
    max: 1000,
    standard: 1,
  },
  {
    name: "planner",
    label: "Planner",
    type: "choice",
    options: ["ilp", "ddp", "fsdp", "hsdp", "fsdp-tp", "tp", "data-parallel", "fully-sharded", "tensor-parallel"],
    standard: "ilp",
  },
  { name: "techniques", label: "Techniques", type: "checks", options: TECHNIQUES, wide: true },
  { name: "data_axes", label: "Data axes", hint: "axes that split the batch only, one a line", type: "lines" },
  { name: "opaque_modules", label: "Opaque modules", hint: "modules that run as one op, one a line", type: "lines" },
  {
    name: "executable_only",
    label: "Only plans that shard_module runs",
    hint: "without it pipelines are searched too",
    type: "switch",
    standard: true,
  },
];
