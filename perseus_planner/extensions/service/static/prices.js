// Cost of energy: defaults that viewers can change in their browser.

import { byId } from "./dom.js";
import { kilograms, kilowattHours, number } from "./format.js";

const DEFAULTS = { price: 0.12, pue: 1.2, grid: 0.4 };
const STORED = "planner-prices";
const J_PER_KWH = 3.6e6;

let prices = { ...DEFAULTS, ...stored() };

/** Fill the form, and call `changed` whenever the prices change. */
export function watchPrices(changed) {
  for (const name of Object.keys(DEFAULTS)) byId(name).value = prices[name];
  byId("prices").addEventListener("submit", (event) => event.preventDefault());
  byId("prices").addEventListener("input", () => {
    if (!byId("prices").checkValidity()) return;
    prices = Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, byId(name).valueAsNumber]));
    localStorage.setItem(STORED, JSON.stringify(prices));
    changed();
  });
}

export const money = (energy_j) => `${(cost(energy_j) * prices.price).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}\u00a0USD`;
export const carbon = (energy_j) => `${kilograms(cost(energy_j) * prices.grid)} CO₂e`;

/** The energy that `money` and `carbon` are of: what the GPUs use, and what cooling and conversion add. */
export const withPue = (energy_j) => `for ${kilowattHours(energy_j * prices.pue)} with PUE ${number(prices.pue)}`;

/** The assumptions of `money` and `carbon`. */
export const assumed = () => `at ${number(prices.price)} USD/kWh, ${number(prices.grid)} kg CO₂e/kWh`;

const cost = (energy_j) => (energy_j / J_PER_KWH) * prices.pue;

function stored() {
  try {
    const found = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    return Object.fromEntries(Object.entries(found).filter(([name, value]) => name in DEFAULTS && Number.isFinite(value)));
  } catch {
    return {}; // written by another page at this address, or by hand
  }
}
