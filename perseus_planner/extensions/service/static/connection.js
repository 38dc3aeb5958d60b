// Polling: at intervals, at once when asked, and with growing pauses while the service cannot be reached.

import { Away, Refused } from "./api.js";

const FIRST_MS = 500;
const LONGEST_MS = 15_000;

/** The connection to the service. Emits "change" when its state changes, and "nudge" when the service should be asked at once. */
export class Connection extends EventTarget {
  heardMs = null; // when the service last answered, by this machine's clock; null if never
  away = null; // the Away error while the service cannot be reached; otherwise null
  nudges = 0;
  #pauseMs = FIRST_MS;

  heard() {
    const back = this.away !== null;
    [this.heardMs, this.away, this.#pauseMs] = [Date.now(), null, FIRST_MS];
    if (back) this.nudge();
    this.dispatchEvent(new Event("change"));
  }

  /** Record a failed request, and return the pause until the next try. */
  lost(error) {
    this.away = error;
    const pauseMs = this.#pauseMs * (0.75 + Math.random() / 2); // so that pages do not all return at the same moment
    this.#pauseMs = Math.min(this.#pauseMs * 2, LONGEST_MS);
    this.dispatchEvent(new Event("change"));
    return pauseMs;
  }

  nudge() {
    this.nudges += 1;
    this.dispatchEvent(new Event("nudge"));
  }

  /** Wait for a nudge after the first `seen` nudges, for `ms` milliseconds, or for `signal`. */
  async rest(seen, ms, signal) {
    if (this.nudges !== seen || signal.aborted) return;
    await new Promise((resolve) => {
      const over = new AbortController();
      const end = () => {
        clearTimeout(timer);
        over.abort();
        resolve();
      };
      const timer = setTimeout(end, ms);
      this.addEventListener("nudge", end, { signal: over.signal });
      signal.addEventListener("abort", end, { signal: over.signal });
    });
  }
}

/** Run `task` now, at every nudge and every `everyMs`, until `signal` or a refusal, which is returned. */
export async function repeat(connection, task, everyMs, signal) {
  while (!signal.aborted) {
    const seen = connection.nudges; // before the task, so that none is missed
    let pauseMs = everyMs;
    try {
      await task();
      connection.heard();
    } catch (error) {
      if (signal.aborted) return null;
      if (error instanceof Refused) return error;
      if (!(error instanceof Away)) throw error;
      pauseMs = connection.lost(error);
    }
    await connection.rest(seen, pauseMs, signal);
  }
  return null;
}
