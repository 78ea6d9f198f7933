/** The server's HTTP API, with the token of this browser tab, and its errors as problem details (RFC 9457). */

const KEY = "shardplan-token";
const ENDED = ["succeeded", "failed", "cancelled"];
const RETRY_MS = 1500;

/** An error of the server: `title`, `detail`, `what_to_do`, `status`, and fields at fault. */
export class Problem extends Error {
  constructor(data) {
    super(data.detail || data.title);
    this.data = data;
    this.status = data.status;
  }

  /** Returns the text of each field at fault by the field's name; the field `body.model.hf_config` is `model`. */
  fields() {
    const faults = (this.data.errors ?? []).map(({ where, what }) => [
      where.replace(/^body\./, "").split(".")[0],
      what,
    ]);
    if (this.data.field)
      faults.push([String(this.data.field), [this.data.detail, this.data.what_to_do].filter(Boolean).join(" ")]);
    return new Map(faults);
  }
}

/** Returns the token that was given in this tab, "" if none was. */
export function storedToken() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** Keeps a token until the tab is closed; "" forgets it. */
export function storeToken(token) {
  if (token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
}

/**
 * Returns the API's calls. All of them throw a `Problem` where the server refuses or cannot be reached.
 * @param {function(): Promise<boolean>} askForToken asks the user for a token; whether one was given
 */
export function client(askForToken) {
  const views = new Map();

  async function send(method, path, body = null, more = {}) {
    const response = await once(method, path, body, more);
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (problem.status === 401 && (await askForToken())) return send(method, path, body, more);
    throw problem;
  }

  const json = async (method, path, body) => (await send(method, path, body)).json();

  return {
    get: (path) => json("GET", path),
    post: (path, body) => json("POST", path, body),
    cancel: (id) => json("DELETE", `/v1/plans/${id}`),
    file: async (path) => (await send("GET", path)).text(),

    /** Returns the view of a job's plan; it never changes, and is read once. */
    async view(id) {
      if (!views.has(id)) views.set(id, await json("GET", `/v1/plans/${id}/view`));
      return views.get(id);
    },

    /** Submits a plan's request and returns its job, `{id, status, ...}`. */
    async submit(request) {
      const job = await json("POST", "/v1/plans", request);
      rememberRequest(job.id, request);
      return job;
    },

    /** Yields the events of a job from the first to the last; after a lost connection it goes on. */
    async *events(id, signal) {
      let last = "0";
      while (!signal.aborted) {
        const read = await send("GET", `/v1/plans/${id}/events`, null, {
          signal,
          headers: { "Last-Event-ID": last },
        }).catch(rethrownUnless(signal));
        if (!read) return;
        try {
          for await (const event of messages(read.body)) {
            last = event.id || last;
            yield event.data;
            if (ENDED.includes(event.data.stage)) return;
          }
        } catch (error) {
          if (signal.aborted) return;
          if (error instanceof SyntaxError) throw error;
        }
        await pause(RETRY_MS);
      }
    },

    /** Returns a job when it has ended. */
    async ended(id, signal) {
      for (;;) {
        const job = await json("GET", `/v1/plans/${id}`);
        if (ENDED.includes(job.status) || signal.aborted) return job;
        await pause(RETRY_MS);
      }
    },
  };
}

/** Returns the request of a job that this tab submitted, null if it did not. */
export function rememberedRequest(id) {
  const text = sessionStorage.getItem(`shardplan-request-${id}`);
  return text ? JSON.parse(text) : null;
}

function rememberRequest(id, request) {
  try {
    sessionStorage.setItem(`shardplan-request-${id}`, JSON.stringify(request));
  } catch {
    return; // a large graph exceeds the storage; the form is then empty after a failure
  }
}

async function once(method, path, body, { signal, headers = {} }) {
  const token = storedToken();
  if (token) headers = { ...headers, Authorization: `Bearer ${token}` };
  if (body) headers = { ...headers, "Content-Type": "application/json" };
  try {
    return await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      title: "The server does not answer",
      detail: error.message,
      what_to_do: "Check that it runs and that this machine is online.",
      status: 0,
    });
  }
}

async function problemOf(response) {
  const plain = { title: `The server answered ${response.status}`, detail: response.statusText };
  const data = await response.json().catch(() => plain);
  return new Problem({ ...plain, ...data, status: response.status });
}

async function* messages(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").map((line) => line.split(/: ?(.*)/s));
      const values = Object.fromEntries(lines.filter(([name]) => name));
      if (values.data) yield { id: values.id, data: JSON.parse(values.data) };
    }
  }
}

function rethrownUnless(signal) {
  return (error) => {
    if (!signal.aborted) throw error;
  };
}

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
