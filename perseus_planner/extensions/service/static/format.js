// Numbers and times as texts, with thousands separators and units.

import { nowS } from "./api.js";

const { number } = charts;

const POWERS = [[1e6, "MW"], [1e3, "kW"]];
const ENERGIES = [[1e12, "TJ"], [1e9, "GJ"], [1e6, "MJ"], [1e3, "kJ"]];

/** A number with four significant digits and its unit. */
function quantity(value, unit) {
  if (value === null || !Number.isFinite(value)) return `–\u00a0${unit}`;
  const size = Math.abs(value);
  const places = size >= 1000 || size === 0 ? 0 : Math.min(9, Math.max(0, 3 - Math.floor(Math.log10(size))));
  return `${value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places })}\u00a0${unit}`;
}

export const seconds = (value) => (value !== null && value < 0.1 ? quantity(value * 1e3, "ms") : quantity(value, "s"));
export const watts = (value) => scaled(value, "W", POWERS);
export const joules = (value) => scaled(value, "J", ENERGIES);
export const kilograms = (value) => quantity(value, "kg");
export const kilowattHours = (value_j) => quantity(value_j / 3.6e6, "kWh");
export { number };

/** A quantity with a larger unit from ten thousand on, so that it never has more than five digits. */
function scaled(value, unit, units) {
  const [factor, name] = units.find(([each]) => Math.abs(value) >= 10 * each) ?? [1, unit];
  return quantity(value / factor, name);
}

/** How much less `value` is than `baseline`, such as "12.3 % less"; "" if unknown. */
export function less(value, baseline) {
  if (!(baseline > 0) || value === null) return "";
  const share = 100 * (1 - value / baseline);
  if (Math.abs(share) < 0.05) return "the same";
  return `${number(Math.abs(share), 1)}\u00a0% ${share > 0 ? "less" : "more"}`;
}

/** Whether it is known what a job has saved: of most of its energy. */
export const isJudged = (telemetry) => Boolean(telemetry?.energy_is) && telemetry.judged_j > 0 && telemetry.judged_j >= 0.5 * telemetry.energy_j;

/** The share of energy that a job has saved, with its 95 % interval, such as "12.3 ± 0.4 %". */
export function savedShare({ saved_j, judged_j, lowered, saved_error_j, saved_variance_j2 }) {
  if (!lowered) return `${number(0)}\u00a0%`;
  const whole_j = judged_j + saved_j;
  const within_j = 1.96 * Math.sqrt(saved_error_j ** 2 + Math.max(0, saved_variance_j2));
  return `${number((100 * saved_j) / whole_j, 1)}\u00a0±\u00a0${number((100 * within_j) / whole_j, 1)}\u00a0%`;
}

/** A span in its two largest units, such as "3 h 5 min". */
export function span(span_s) {
  const whole = Math.max(0, Math.round(span_s));
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([count]) => count > 0);
  if (first < 0) return "0\u00a0s";
  return parts.slice(first, first + 2).filter(([count]) => count > 0).map(([count, unit]) => `${number(count)}\u00a0${unit}`).join(" ");
}

/** A power budget that begins later, such as "at most 30 kW from 18:00". */
export const budgetText = (step) => `${step.power_w === null ? "no budget" : `at most ${watts(step.power_w)}`} from ${moment(step.start_s)}`;

/** A moment in the locale and the time zone of the browser, which it names; with the date unless it is today. */
export function moment(at_s) {
  const at = new Date(at_s * 1000);
  const today = at.toDateString() === new Date(nowS() * 1000).toDateString();
  return at.toLocaleString(undefined, today ? { timeStyle: "long" } : { dateStyle: "medium", timeStyle: "long" });
}

/** Whole numbers as ranges, such as "0, 2–7". */
export function ranges(numbers) {
  const runs = [];
  for (const each of numbers) {
    const last = runs.at(-1);
    if (last && each === last[1] + 1) last[1] = each;
    else runs.push([each, each]);
  }
  const shown = runs.slice(0, 8).map(([from, to]) => (from === to ? `${from}` : to === from + 1 ? `${from}, ${to}` : `${from}–${to}`));
  return shown.join(", ") + (runs.length > 8 ? " …" : "");
}

export const count = (amount, one, many = `${one}s`) => `${number(amount)}\u00a0${amount === 1 ? one : many}`;

/** The seconds in a text such as 90, 30s, 30m, 2h or 1d; null for an empty text. Throws a TypeError for others. */
export function spanOf(text) {
  const trimmed = text.trim();
  if (trimmed === "") return null;
  const match = /^(\d+(?:\.\d+)?|\.\d+)\s*(s|m|min|h|d)?$/.exec(trimmed);
  if (match === null) throw new TypeError(`${trimmed} is not a time; write it as 30s, 30m or 2h`);
  return Number(match[1]) * { s: 1, m: 60, min: 60, h: 3600, d: 86400 }[match[2] ?? "s"];
}

/** The origin of a figure computed from plans, given that of their profile. */
export const byPlans = (origin) => (origin === "simulated" ? "simulated" : "replayed");

/** Name a profile by its origin. */
export const profileText = (origin) => (origin === "unknown" ? "profile of unknown origin" : `${origin} profile`);
