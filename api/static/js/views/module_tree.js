/** The tree of modules that parameter names span. */

/** Returns the parts of an FQN or a pattern of FQNs; dots inside braces, as in `layers.{0...3}`, part nothing. */
export function nameParts(name) {
  return name.match(/(?:\{[^}]*\}|[^.])+/g) ?? [];
}

/**
 * Returns the root of the tree of `parameters`. A node has `name` (its own part of the FQN), `path`, `children`,
 * `bytes` of all parameters in it on one device, `count` of equal modules, and `parameter` where it is a leaf. A module
 * with a single child is one node with it.
 */
export function moduleTree(parameters) {
  const root = { name: "", path: "", children: new Map(), parameter: null };
  for (const parameter of parameters) {
    let node = root;
    for (const part of nameParts(parameter.name)) {
      const path = node.path ? `${node.path}.${part}` : part;
      if (!node.children.has(part)) node.children.set(part, { name: part, path, children: new Map(), parameter: null });
      node = node.children.get(part);
    }
    node.parameter = parameter;
  }
  return { ...joined(root), name: "" };
}

/** Returns the nodes below `node` in order, each as `{node, level}`; `open(node)` tells whether to go on below it. */
export function flattened(node, open, level = 0) {
  return node.children.flatMap((child) => [
    { node: child, level },
    ...(open(child) ? flattened(child, open, level + 1) : []),
  ]);
}

/** Returns the tree with the parameters that `keep` accepts, null where there is none. */
export function filtered(node, keep) {
  if (node.parameter && !node.children.length) return keep(node.parameter) ? node : null;
  const children = node.children.map((child) => filtered(child, keep)).filter(Boolean);
  return children.length ? { ...node, children } : null;
}

function joined(node) {
  const children = [...node.children.values()].map(joined);
  const [only] = children;
  if (node.path && children.length === 1 && !node.parameter) return { ...only, name: `${node.name}.${only.name}` };
  const sizes = [node.parameter?.bytes ?? null, ...children.map((child) => child.bytes)].filter((size) => size != null);
  const counts = [node.parameter?.count ?? Infinity, ...children.map((child) => child.count)];
  return {
    name: node.name,
    path: node.path,
    parameter: node.parameter,
    children,
    bytes: sizes.length ? sizes.reduce((total, size) => total + size, 0) : null,
    count: Math.min(...counts),
  };
}
