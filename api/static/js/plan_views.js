/** The views of a plan that need no server, in their order: the report has these, the server's page has more. */

import { communication } from "shardplan/views/communication.js";
import { layouts } from "shardplan/views/layouts.js";
import { memory } from "shardplan/views/memory.js";
import { meshes } from "shardplan/views/meshes.js";
import { ops } from "shardplan/views/ops.js";
import { overview } from "shardplan/views/overview.js";
import { timeline } from "shardplan/views/timeline.js";

/** The views: `name` in URLs, `title`, `draw(view, context)`, `keys` of the state that a view depends on. */
export const PLAN_VIEWS = [overview, memory, timeline, layouts, ops, communication, meshes];
