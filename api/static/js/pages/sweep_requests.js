/** The requests of a sweep, made from the request of a plan. */

import { simpleCluster } from "shardplan/pages/cluster_input.js";

const NODE_FACTORS = [0.5, 1, 2, 4];
const CAP_PERCENTAGES = [100, 85, 70, 55, 40];

/**
 * Returns the requests of a sweep, each with its `key`: the factor on the nodes, or the cap in percent.
 * @param {"nodes"|"caps"} kind
 * @param {Object} view of a plan, with its `request` and `cluster`
 */
export function requestsOfSweep(kind, { request, cluster }) {
  return kind === "nodes" ? onOtherNodes(request) : underCaps(request, cluster);
}

/** A fixed mesh and fixed micro-batches belong to one number of devices, so they are left out. */
function onOtherNodes({ mesh, micro_batches, ...request }) {
  const scaled = (factor) => ({ key: factor, cluster: withNodes(request.cluster, factor) });
  const points = NODE_FACTORS.map(scaled).filter((point) => point.cluster !== null);
  return points.map(({ key, cluster }) => ({
    key,
    request: { ...(key === 1 ? { mesh, micro_batches } : {}), ...request, cluster },
  }));
}

function underCaps(request, cluster) {
  if (!cluster) return [];
  return CAP_PERCENTAGES.map((share) => ({
    key: share,
    request: { ...request, memory_gb: Number(((share * cluster.memory_bytes) / 1e11).toPrecision(6)) },
  }));
}

/** Returns the cluster with `factor` times its nodes, null where that is no whole number or its nodes are unlike. */
function withNodes(cluster, factor) {
  if (factor === 1) return cluster;
  const simple = simpleCluster(cluster);
  if (!simple && (typeof cluster === "string" || cluster.groups)) return null;
  const wanted = factor * ((simple ?? cluster).nodes ?? 1);
  if (!Number.isInteger(wanted)) return null;
  return simple ? `${wanted}x${simple.perNode}x${simple.device}` : { ...cluster, nodes: wanted };
}
