// The service's API, asked by the page with the token of whoever looks at it.

/** The service cannot be asked now: it cannot be reached, or cannot go on. */
export class Away extends Error {}

/** The service has refused what was asked; `status` is that of HTTP. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const STORED = "planner-token"; // of the tab's session: it ends with the tab
const PATIENCE_MS = 10_000;
const SILENCE_MS = 40_000; // an event stream says something every 15 s

let token = sessionStorage.getItem(STORED);
let aheadMs = 0; // by how much the service's clock is ahead of this one

/** Use that token from now on; null: none. */
export function useToken(given) {
  token = given;
  if (given === null) sessionStorage.removeItem(STORED);
  else sessionStorage.setItem(STORED, given);
}

export const hasToken = () => token !== null;

/** Seconds since the epoch, by the service's clock: its times may not be this machine's. */
export const nowS = () => (Date.now() + aheadMs) / 1000;

/** The JSON that the service answers; null where it answers nothing. Throws Away, Refused, or an AbortError. */
export async function ask(method, path, { body, signal } = {}) {
  const patience = AbortSignal.timeout(PATIENCE_MS);
  const response = await request(method, path, body, signal ? AbortSignal.any([signal, patience]) : patience, signal);
  try {
    return response.status === 204 ? null : await response.json();
  } catch (error) {
    throw signal?.aborted ? error : new Away("its answer broke off");
  }
}

/** The address of a job, or of something of it. */
export const ofJob = (name, ...parts) => ["/v1/jobs", name, ...parts].map((each, index) => (index ? encodeURIComponent(each) : each)).join("/");

/** Call `heard` for every version of the job's plans, until the stream ends. Throws as `ask`. */
export async function events(job, heard, signal) {
  const response = await request("GET", ofJob(job, "events"), undefined, signal, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await within(SILENCE_MS, reader.read());
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) if (block.includes("event: version")) heard();
    }
  } catch (error) {
    throw signal.aborted ? error : new Away("its news broke off");
  } finally {
    reader.cancel().catch(() => {}); // it may have broken off
  }
}

async function request(method, path, body, signal, wanted) {
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    throw wanted?.aborted ? error : new Away("it does not answer");
  }
  setClock(response.headers.get("Date"));
  if (response.ok) return response;
  const message = (await response.json().catch(() => null))?.error?.message ?? `it answers ${response.status}`;
  throw response.status >= 500 ? new Away(message) : new Refused(response.status, message);
}

/** The header has whole seconds; clocks that are less than two apart are taken for equal. */
function setClock(date) {
  const ahead = Date.parse(date ?? "") + 500 - Date.now();
  if (Number.isFinite(ahead)) aheadMs = Math.abs(ahead) < 2000 ? 0 : ahead;
}

function within(limitMs, promise) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Away("it says nothing")), limitMs);
    promise.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}
