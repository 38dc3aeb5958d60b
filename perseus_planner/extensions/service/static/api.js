// Requests to the service's API, with the token of the viewer.

/** The service cannot be reached, or has failed. */
export class Away extends Error {}

/** The service has refused a request; `status` is the HTTP status. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const STORED = "planner-token"; // in the session of the tab, which ends with it
const PATIENCE_MS = 10_000;

let token = sessionStorage.getItem(STORED);
let aheadMs = 0; // the service's clock minus this one
const answered = new Map(); // path -> the last answer that had a tag: {tag, value}

/** Use a token from now on; null for none. */
export function useToken(given) {
  token = given;
  answered.clear();
  if (given === null) sessionStorage.removeItem(STORED);
  else sessionStorage.setItem(STORED, given);
}

export const hasToken = () => token !== null;

/** Seconds since the epoch by the service's clock, which may differ from this machine's. */
export const nowS = () => (Date.now() + aheadMs) / 1000;

/** Return the JSON of an answer; null if it is empty. Throws Away, Refused or an AbortError. */
export async function ask(method, path, { body, signal } = {}) {
  const known = answered.get(path);
  const patience = AbortSignal.timeout(PATIENCE_MS);
  const response = await request(method, path, body, signal ? AbortSignal.any([signal, patience]) : patience, signal);
  try {
    if (response.status === 304) return known.value;
    const value = response.status === 204 ? null : await response.json();
    const tag = response.headers.get("ETag");
    if (tag !== null) answered.set(path, { tag, value });
    return value;
  } catch (error) {
    throw signal?.aborted ? error : new Away("its answer was cut off");
  }
}

/** The path of a job, or of a part of it. */
export const ofJob = (name, ...parts) => ["/v1/jobs", name, ...parts].map((each, index) => (index ? encodeURIComponent(each) : each)).join("/");

async function request(method, path, body, signal, viewer) {
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (method === "GET" && answered.has(path)) headers["If-None-Match"] = answered.get(path).tag;
  let response;
  try {
    response = await fetch(path, { method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    throw viewer?.aborted ? error : new Away("no answer");
  }
  setClock(response.headers.get("Date"));
  if (response.ok || response.status === 304) return response;
  const message = (await response.json().catch(() => null))?.detail ?? `status ${response.status}`;
  throw response.status >= 500 ? new Away(message) : new Refused(response.status, message);
}

/** The header has whole seconds, so clocks less than two seconds apart count as equal. */
function setClock(date) {
  const ahead = Date.parse(date ?? "") + 500 - Date.now();
  if (Number.isFinite(ahead)) aheadMs = Math.abs(ahead) < 2000 ? 0 : ahead;
}
