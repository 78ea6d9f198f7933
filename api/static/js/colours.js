/** Colours of the page's meanings, defined once in page.css: roles of axes, roles of memory, kinds of time. */

const AXIS_ROLES = ["dp", "fsdp", "tp", "cp", "ep", "pp", "repeat"];
const MEMORY_ROLES = [
  "parameters",
  "gradients",
  "optimizer_state",
  "activations",
  "transient",
  "recomputed_block",
  "allocator",
  "context",
  "kv_cache",
];
const TIME_PARTS = {
  compute: "--time-compute",
  forward: "--time-forward",
  backward: "--time-backward",
  recompute: "--time-recompute",
  "exposed communication": "--time-exposed",
  exposed: "--time-exposed",
  overlapped: "--time-overlapped",
  "gradient reduction": "--time-exposed",
  optimizer: "--time-optimizer",
  bubble: "--time-idle",
  idle: "--time-idle",
  "overlapped communication": "--time-overlapped",
};

/** Returns the CSS variable of an axis' role. */
export function axisVariable(role) {
  return AXIS_ROLES.includes(role) ? `--axis-${role}` : "--axis-repeat";
}

/** Returns the CSS variable of a role of memory. */
export function memoryVariable(role) {
  return MEMORY_ROLES.includes(role) ? `--memory-${role}` : "--memory-context";
}

/** Returns the CSS variable of a part, phase or kind of time. */
export function timeVariable(name) {
  return TIME_PARTS[name] ?? "--time-other";
}

/** Returns CSS's value of a variable, such as `var(--axis-tp)`. */
export function css(variable) {
  return `var(${variable})`;
}

/**
 * Returns a function from CSS variables to the colours that they have in the present theme, for drawing on a canvas.
 * @returns {function(string): string}
 */
export function resolvedColours() {
  const known = new Map();
  return (variable) => {
    if (!known.has(variable)) {
      const probe = document.body.appendChild(document.createElement("span"));
      probe.style.color = css(variable);
      known.set(variable, getComputedStyle(probe).color);
      probe.remove();
    }
    return known.get(variable);
  };
}

/** Returns the role of each axis of a plan by its name. */
export function axisRoles(view) {
  return new Map((view.axes ?? []).map((axis) => [axis.name, axis.role]));
}
