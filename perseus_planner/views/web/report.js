// Draws the figures of a report from the data in the page. Iterations are Gantt charts on canvases below each other, with one time
// axis that is zoomed and moved for all.
//
// A lane is one rank. Its computations are lists of whole microseconds and become typed arrays, nothing else: tens of
// thousands of them must be redrawn while a finger moves.

"use strict";

const timelines = (() => {
  const WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
  const PARTS = { F: [0, 0.6], B: [0, 1], I: [0, 1], W: [0.4, 0.6], o: [0.35, 0.3] }; // of a lane: from its top, and height
  const LEFT = 40, AXIS = 22, GAP = 3; // px: for the numbers of ranks, for the time axis, and between lanes

  /** Adds the start and end of each computation, and its name, to a lane. */
  function unpacked(lane, program) {
    const count = lane.times_us.length;
    const [begins, ends] = [new Float64Array(count), new Float64Array(count)];
    let at = 0;
    for (let index = 0; index < count; index += 1) {
      begins[index] = at += lane.gaps_us[index];
      ends[index] = at += lane.times_us[index];
    }
    const names = program.split(" ");
    return { ...lane, begins, ends, names, kinds: names.map((name) => /^\d+([FBIW])\d+$/.exec(name)?.[1] ?? "o") };
  }

  /** Returns the first index whose end is after `time`, by bisection. */
  function firstAfter(ends, time) {
    let [low, high] = [0, ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Returns the least and greatest known value of a list of all lanes, or null if none is known. */
  function extent(lanes, key) {
    let [low, high] = [Infinity, -Infinity];
    for (const lane of lanes) {
      for (const value of lane[key] ?? []) {
        if (value === null) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    return low <= high ? { low, high } : null;
  }

  /** Returns a colour for each of 64 steps from low to high, between the five of the theme. */
  function scale() {
    const style = getComputedStyle(document.documentElement);
    const stops = [0, 1, 2, 3, 4].map((index) => rgb(style.getPropertyValue(`--scale-${index}`).trim()));
    return Array.from({ length: 64 }, (_, step) => {
      const at = (step / 63) * 4, low = Math.min(3, Math.floor(at)), part = at - low;
      const mixed = stops[low].map((value, channel) => Math.round(value + part * (stops[low + 1][channel] - value)));
      return `rgb(${mixed.join(",")})`;
    });
  }

  function rgb(hex) {
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  }

  /** Describes a computation such as "3F17" in words. */
  function described(name, rank) {
    const match = /^(\d+)([FBIW])(\d+)$/.exec(name);
    return match ? `rank ${rank}, ${name}: ${WORDS[match[2]]} of microbatch ${match[3]}, stage ${match[1]}` : `rank ${rank}, ${name}: of fixed time`;
  }

  /** Draws all iterations of a report into `place`; `unit` is the unit of clocks. */
  function show(place, data, unit) {
    const all = data.map((each) => ({ ...each, lanes: each.lanes.map((lane, rank) => unpacked(lane, each.programs[rank])) }));
    const lanes = all.flatMap((each) => each.lanes);
    const ranges = { power: extent(lanes, "powers_w"), clock: extent(lanes, "clocks") };
    const whole = Math.max(...all.map((each) => each.time_us), ...lanes.map((lane) => lane.ends[lane.ends.length - 1] ?? 0));
    const view = { from: 0, to: whole, selecting: null, colour: ranges.power ? "power" : "clock" };
    const shown = all.map((each) => added(place, each));
    for (const kind of new Set(lanes.flatMap((lane) => lane.kinds))) document.querySelector(`[data-kind=${kind}]`).hidden = false;
    let pending = false;

    function redraw() {
      if (pending) return;
      pending = true;
      requestAnimationFrame(() => { pending = false; draw(); });
    }

    function draw() {
      const colours = palette();
      for (const each of shown) paint(each, view, ranges[view.colour], colours);
      legend(view, ranges, unit, colours, lanes.some((lane) => lane.powers_w === null));
    }

    function zoom(factor, around = (view.from + view.to) / 2) {
      const length = Math.min(whole, Math.max(50, (view.to - view.from) * factor)); // us; nothing to see in less
      const part = (around - view.from) / (view.to - view.from);
      move(around - part * length, length);
    }

    function move(from, length = view.to - view.from) {
      view.from = Math.min(Math.max(0, from), whole - length);
      view.to = view.from + length;
      redraw();
    }

    const actions = {
      in: () => zoom(0.5), out: () => zoom(2), all: () => move(0, whole),
      left: () => move(view.from - (view.to - view.from) / 4), right: () => move(view.from + (view.to - view.from) / 4),
    };
    for (const button of document.querySelectorAll("[data-timeline]")) button.addEventListener("click", actions[button.dataset.timeline]);
    for (const button of document.querySelectorAll("[data-colour]")) {
      button.disabled = ranges[button.dataset.colour] === null;
      button.addEventListener("click", () => {
        view.colour = button.dataset.colour;
        pressed(view);
        redraw();
      });
    }
    pressed(view);
    for (const each of shown) listen(each, view, { zoom, move, actions, redraw, unit, whole });
    new ResizeObserver(redraw).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("beforeprint", () => { document.documentElement.classList.add("printing"); draw(); });
    addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); draw(); });
    draw();
    return { view, whole };
  }

  /** Marks the button of the current colouring as pressed. */
  function pressed(view) {
    for (const button of document.querySelectorAll("[data-colour]")) button.setAttribute("aria-pressed", String(button.dataset.colour === view.colour));
  }

  /** Adds the elements of one timeline. */
  function added(place, timeline) {
    const label = `${timeline.name}, ${timeline.note}: ${timeline.lanes.length} ranks, ${charts.number(timeline.time_us / 1e6)} s. Arrow keys go from computation to computation.`;
    const canvas = charts.html("canvas", { tabindex: "0", role: "application", "aria-label": label });
    const readout = charts.html("p", { class: "readout", role: "status" });
    const note = charts.html("span", { class: "note" }, `${timeline.note} · ${charts.number(timeline.time_us / 1e6)}\u00a0s `);
    const origin = charts.html("span", { class: "origin" }, timeline.origin);
    place.append(charts.html("div", { class: "timeline" }, charts.html("h3", {}, timeline.name, note, origin), canvas, readout));
    return { timeline, canvas, readout, selected: null };
  }

  function palette() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    return { steps: scale(), ink: of("--ink"), soft: of("--ink-soft"), waiting: of("--waiting"), panel: of("--panel"), critical: of("--critical"), line: of("--line"), accent: of("--accent"), unknown: of("--series-7"), font: of("--font") };
  }

  /** Sizes a canvas in CSS pixels, sharp on any screen, and returns its context. */
  function prepared(canvas, width, height) {
    const ratio = Math.min(3, devicePixelRatio || 1);
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }

  function geometry({ canvas, timeline }) {
    const count = timeline.lanes.length, width = canvas.parentElement.clientWidth;
    const high = Math.min(26, Math.max(7, Math.floor(300 / count)));
    return { width, high, left: LEFT, span: width - LEFT - 2, height: count * (high + GAP) + AXIS };
  }

  function paint(shown, view, range, colours) {
    const { timeline, canvas, selected } = shown;
    const place = geometry(shown);
    if (place.width === 0) return;
    const context = prepared(canvas, place.width, place.height);
    const x = (time) => place.left + ((time - view.from) / (view.to - view.from)) * place.span;
    context.font = `11px ${colours.font}`;
    context.save();
    context.beginPath();
    context.rect(place.left, 0, place.span, place.height);
    context.clip();
    timeline.lanes.forEach((lane, rank) => {
      const y = rank * (place.high + GAP);
      context.fillStyle = colours.waiting;
      context.fillRect(x(0), y, x(timeline.time_us) - x(0), place.high);
      bars(context, lane, view, x, y, place.high, range, colours);
    });
    if (selected !== null) mark(context, timeline, selected, x, place, colours);
    if (view.selecting !== null) selection(context, view.selecting, x, place, colours);
    context.restore();
    ticks(context, view, x, place, colours);
    ranks(context, timeline, place, colours);
  }

  function bars(context, lane, view, x, y, high, range, colours) {
    const values = view.colour === "power" ? lane.powers_w : lane.clocks;
    const width = range === null ? 1 : Math.max(1, range.high - range.low);
    let filled = -Infinity; // px up to which the lane is drawn; of bars narrower than a pixel, only the first is visible
    for (let index = firstAfter(lane.ends, view.from); index < lane.ends.length && lane.begins[index] < view.to; index += 1) {
      const end = Math.round(x(lane.ends[index]));
      let begin = Math.max(filled, Math.round(x(lane.begins[index])));
      if (end <= begin) continue;
      filled = end;
      const value = values === null ? null : values[index];
      const isWide = end - begin > 3;
      const [from, part] = PARTS[lane.kinds[index]];
      const [top, height] = [y + Math.round(from * high), Math.max(2, Math.round(part * high))];
      if (part < 1) { // what is left of the lane is not waiting
        context.fillStyle = colours.panel;
        context.fillRect(begin, y, end - begin, high);
      }
      context.fillStyle = value === null ? colours.unknown : colours.steps[Math.round((63 * (value - range.low)) / width)];
      context.fillRect(begin, top, end - begin - (isWide ? 1 : 0), height);
      if (lane.spare_us !== null && lane.spare_us[index] === 0) {
        context.fillStyle = colours.critical;
        context.fillRect(begin, top + height - Math.max(2, high / 7), end - begin, Math.max(2, high / 7));
      }
      if (end - begin > 44 && height >= 12) {
        context.fillStyle = "#10151a"; // legible on the scale, except at its ends, where text is white
        if (value === null || [0, 1].some((far) => Math.abs((value - (range?.low ?? 0)) / width - far) < 0.12)) context.fillStyle = "#ffffff";
        context.fillText(lane.names[index], begin + 4, top + height / 2 + 3);
      }
    }
  }

  /** Draws the part of the time axis that the pointer is selecting. */
  function selection(context, { from, to }, x, place, colours) {
    const [left, right] = [x(Math.min(from, to)), x(Math.max(from, to))];
    context.globalAlpha = 0.25;
    context.fillStyle = colours.accent;
    context.fillRect(left, 0, right - left, place.height - AXIS);
    context.globalAlpha = 1;
    context.strokeStyle = colours.accent;
    context.strokeRect(left, 0, right - left, place.height - AXIS);
  }

  function mark(context, timeline, { rank, index }, x, place, colours) {
    const lane = timeline.lanes[rank], begin = x(lane.begins[index]);
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.strokeRect(begin - 1, rank * (place.high + GAP) - 1, Math.max(3, x(lane.ends[index]) - begin + 1), place.high + 2);
  }

  function ticks(context, view, x, place, colours) {
    const isShort = view.to - view.from < 2e5; // us
    const [unit, size] = isShort ? ["ms", 1e3] : ["s", 1e6];
    const found = charts.ticks(view.from / size, view.to / size, Math.max(2, place.width / 130));
    context.fillStyle = colours.soft;
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    for (const value of found.values) {
      const at = Math.round(x(value * size)) + 0.5, text = `${charts.number(value, found.digits)} ${unit}`;
      context.beginPath();
      context.moveTo(at, place.height - AXIS);
      context.lineTo(at, place.height - AXIS + 5);
      context.stroke();
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(at - half, place.left), place.width - 2 * half), place.height - 4);
    }
  }

  function ranks(context, timeline, place, colours) {
    const every = Math.ceil(11 / (place.high + GAP)); // keeps numbers apart
    context.fillStyle = colours.soft;
    timeline.lanes.forEach((_, rank) => {
      if (rank % every) return;
      const text = `${rank}`;
      context.fillText(text, place.left - 8 - context.measureText(text).width, rank * (place.high + GAP) + place.high / 2 + 4);
    });
  }

  function legend(view, ranges, unit, colours, lacksPower) {
    const range = ranges[view.colour];
    for (const each of document.querySelectorAll(".unknown")) each.hidden = view.colour !== "power" || !lacksPower;
    for (const each of document.querySelectorAll(".scale")) {
      const context = prepared(each.querySelector("canvas"), 144, 13);
      colours.steps.forEach((colour, step) => { context.fillStyle = colour; context.fillRect(step * 2.25, 0, 2.5, 13); });
      const name = view.colour === "power" ? "W" : unit;
      each.querySelector(".low").textContent = range === null ? "" : charts.number(range.low);
      each.querySelector(".high").textContent = range === null ? "" : charts.quantity(range.high, name);
    }
  }

  // --- Pointer and keyboard ------------------------------------------------------------------------------------------

  function listen(shown, view, { zoom, move, actions, redraw, unit, whole }) {
    const { canvas, timeline, readout } = shown;
    const pixels = () => (view.to - view.from) / geometry(shown).span;
    const time = (event) => view.from + (event.clientX - canvas.getBoundingClientRect().left - LEFT) * pixels();
    let drag = null; // where a move of the view began: by a finger, or with Shift; a mouse without Shift selects
    let isPointed = false; // a page that scrolls under a resting pointer goes on scrolling

    function select(found) {
      shown.selected = found?.index === undefined ? null : found;
      const text = found === null ? "" : description(timeline, found, unit);
      if (readout.textContent !== text) readout.textContent = text;
      redraw();
    }

    canvas.addEventListener("pointermove", (event) => {
      if (event.movementX || event.movementY) isPointed = true;
      if (drag !== null) move(drag.from - (event.clientX - drag.x) * pixels());
      else if (view.selecting !== null) {
        view.selecting.to = time(event);
        redraw();
      } else select(under(shown, time(event), event));
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      if (event.pointerType === "touch" || event.shiftKey) drag = { x: event.clientX, from: view.from };
      else view.selecting = { from: time(event), to: time(event) };
      canvas.setPointerCapture(event.pointerId);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => {
      const range = view.selecting;
      drag = view.selecting = null;
      if (range !== null && name === "pointerup" && Math.abs(range.to - range.from) > 5 * pixels()) {
        const [from, to] = [Math.min(range.from, range.to), Math.max(range.from, range.to)].map((each) => Math.min(Math.max(0, each), whole));
        move(from, Math.max(50, to - from));
      }
      redraw();
    });
    canvas.addEventListener("wheel", (event) => {
      const isAlong = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      const isWhole = view.to - view.from >= whole;
      if (!isPointed || (isWhole && (isAlong || event.deltaY > 0))) return; // there is nothing to zoom or move: the page scrolls
      event.preventDefault();
      if (isAlong) move(view.from + (event.deltaX || event.deltaY) * pixels());
      else zoom(Math.exp(event.deltaY * 0.002), time(event));
    }, { passive: false });
    canvas.addEventListener("dblclick", actions.all);
    canvas.addEventListener("keydown", (event) => {
      const go = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      const around = () => shown.selected === null ? undefined : timeline.lanes[shown.selected.rank].begins[shown.selected.index];
      const keys = { "+": () => zoom(0.5, around()), "=": () => zoom(0.5, around()), "-": () => zoom(2, around()), 0: actions.all, Home: actions.all, Escape: actions.all };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (go && event.shiftKey) ({ ArrowLeft: actions.left, ArrowRight: actions.right }[event.key] ?? (() => {}))();
      else if (go) { select(stepped(timeline, shown.selected, view, go)); follow(shown, view, move); }
      else if (keys[event.key]) keys[event.key]();
      else return;
      event.preventDefault();
    });
    canvas.addEventListener("pointerleave", () => {
      isPointed = false;
      if (drag === null) select(null);
    });
  }

  /** Returns the computation or the waiting under the pointer. */
  function under(shown, time, event) {
    const { timeline, canvas } = shown;
    const rank = Math.floor((event.clientY - canvas.getBoundingClientRect().top) / (geometry(shown).high + GAP));
    const lane = timeline.lanes[rank];
    if (lane === undefined || time < 0 || time > timeline.time_us) return null;
    const index = firstAfter(lane.ends, time);
    if (index < lane.ends.length && lane.begins[index] <= time) return { rank, index };
    return { rank, waits: [index === 0 ? 0 : lane.ends[index - 1], index < lane.ends.length ? lane.begins[index] : timeline.time_us] };
  }

  /** Returns the computation that an arrow key leads to. */
  function stepped(timeline, selected, view, [lanes, places]) {
    if (selected === null) return { rank: 0, index: Math.min(firstAfter(timeline.lanes[0].ends, view.from), timeline.lanes[0].ends.length - 1) };
    const rank = Math.min(Math.max(0, selected.rank + lanes), timeline.lanes.length - 1);
    const { ends } = timeline.lanes[rank];
    const same = firstAfter(ends, timeline.lanes[selected.rank].begins[selected.index]);
    const index = lanes ? same : selected.index + places;
    return { rank, index: Math.min(Math.max(0, index), ends.length - 1) };
  }

  /** Moves the view to the selected computation. */
  function follow({ timeline, selected }, view, move) {
    const { begins, ends } = timeline.lanes[selected.rank], length = view.to - view.from;
    if (begins[selected.index] < view.from || ends[selected.index] > view.to) move(begins[selected.index] - length / 4);
  }

  function description(timeline, { rank, index, waits }, unit) {
    const lane = timeline.lanes[rank], ms = (us) => charts.quantity(us / 1000, "ms", 3);
    if (waits) {
      const power = lane.waiting_w === null ? "" : ` at ${charts.quantity(lane.waiting_w, "W")}`;
      return `Rank ${rank} waits ${ms(waits[1] - waits[0])}${power}, from ${ms(waits[0])}`;
    }
    const parts = [described(lane.names[index], rank), `${ms(lane.times_us[index])} from ${ms(lane.begins[index])}`];
    if (lane.clocks[index] !== null) parts.push(charts.quantity(lane.clocks[index], unit));
    if (lane.powers_w !== null) parts.push(charts.quantity(lane.powers_w[index], "W"));
    if (lane.spare_us !== null) parts.push(lane.spare_us[index] === 0 ? "on a critical path" : `could end ${ms(lane.spare_us[index])} later`);
    const text = parts.join(" · ");
    return text[0].toUpperCase() + text.slice(1);
  }

  return { show };
})();

// --- The report ---------------------------------------------------------------------------------------------------------

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  // Each kind of point has another shape, so that colour is never the only difference. The most important first.
  const LOOKS = {
    plan: [1, "diamond"], run: [4, "triangle"], baseline: [5, "square"], peer: [2, "cross"], landmark: [7, "circle"],
  };

  /** The part of the bound near the points; the rest, useful beside stragglers, may be many times as long. */
  function nearPoints({ times_s: times, energies_j: energies, points }) {
    const end = 1.15 * Math.max(...points.map((point) => point.time_s));
    const count = times.filter((time) => time <= end).length;
    const [x, y] = [times.slice(0, count), energies.slice(0, count)];
    if (count > 0 && count < times.length) {
      const part = (end - times[count - 1]) / (times[count] - times[count - 1]);
      x.push(end);
      y.push(energies[count - 1] + part * (energies[count] - energies[count - 1]));
    }
    return { x, y };
  }

  function frontier(place, chart) {
    const peers = chart.points.filter((point) => point.kind === "peer").map((point) => point.name);
    const colours = { 0: 2, 1: 8, 2: 6 };
    const rank = (point) => Object.keys(LOOKS).indexOf(point.kind);
    const marks = [...chart.points].sort((a, b) => rank(a) - rank(b)).map((point) => {
      const [color, shape] = LOOKS[point.kind];
      const distinct = point.kind === "peer" ? colours[peers.indexOf(point.name)] ?? color : color;
      const label = point.kind === "landmark" ? point.name.replace("bound, ", "") : point.name;
      const title = `${point.name}: ${charts.quantity(point.time_s, "s")}, ${charts.quantity(point.energy_j, "J")} (${point.origin})`;
      return { name: point.name, color: distinct, shape, x: point.time_s, y: point.energy_j, label, title };
    });
    const shown = nearPoints(chart);
    const series = chart.times_s.length ? [{ name: "bound: least energy of any plan of that time", color: LOOKS.landmark[0], ...shown }] : [];
    charts.line(place, {
      description: `Energy of an iteration against its time: ${marks.map((mark) => mark.title).join("; ")}`,
      x: { label: "iteration time", unit: "s" }, y: { label: "energy per iteration, all GPUs of a pipeline", unit: "J" },
      series, marks, table: true,
    });
  }

  /** Draws joules of computing and of waiting on top, side by side for each iteration, of ranks or of phases. */
  function energies(place, part, x, names, height) {
    const shown = data.where.filter((each) => each[part].length);
    const series = shown.flatMap((each) => ["computing", "waiting"].map((what) => ({
      name: `${what}, ${each.name}`, color: LOOKS[each.kind][0], hatched: what === "waiting", onto: what === "waiting",
      y: each[part].map((use) => use[`${what}_j`]),
    })));
    charts.bars(place, {
      description: `Energy of computing and waiting of each ${x} per iteration: ${shown.map((each) => each.name).join(", ")}; the table below has the numbers`,
      x: { label: x, unit: "" }, y: { label: "energy per iteration", unit: "J" }, names, series, table: true, height,
    });
  }

  function changes(place, ranks) {
    charts.bars(place, {
      description: "Clock changes of each rank per iteration; the table below has the numbers",
      x: { label: "rank", unit: "" }, y: { label: "clock changes per iteration", unit: "" },
      names: ranks[0].ranks.map((rank) => `${rank.rank}`),
      series: ranks.map((plan, order) => ({ name: plan.name, color: order === 0 ? LOOKS.plan[0] : ((order + 1) % 8) + 1, y: plan.ranks.map((rank) => rank.clock_changes) })),
      height: 220,
    });
  }

  /** Draws a small chart; those of one kind of computation share their axes, so that stages can be compared. */
  function curve(place, each) {
    const known = each.points.some((point) => point.energy_stderr_j !== null);
    const hull = each.points.filter((point) => each.hull.includes(point.clock)).sort((a, b) => a.time_s - b.time_s);
    const of = (points, key) => points.map((point) => point[key]);
    const alike = data.curves.filter((other) => other.computation === each.computation).flatMap((other) => other.points);
    charts.line(place, {
      description: `Energy against time of ${each.computation} of stage ${each.stage} at ${each.points.length} clocks, from ${each.points[0].clock} to ${each.points[each.points.length - 1].clock} ${data.unit}`,
      x: { label: "time", unit: "s", range: charts.range(of(alike, "time_s")) }, y: { label: "energy", unit: "J", range: charts.range(of(alike, "energy_j")) },
      series: [
        { name: "lower hull", color: 2, x: of(hull, "time_s"), y: of(hull, "energy_j") },
        {
          name: "measured point", color: 1, line: false, dots: true, x: of(each.points, "time_s"), y: of(each.points, "energy_j"),
          errors: known ? of(each.points, "energy_stderr_j") : undefined, xErrors: known ? of(each.points, "time_stderr_s") : undefined,
        },
      ],
      legend: false, height: 130, compact: true,
    });
  }

  /** Draws a value of the iterations of a run without a plan, one after the other. */
  function course(place, found, key, label, unit) {
    const known = found[key].flatMap((value, index) => value === null ? [] : [index]);
    const x = known.map((index) => found.iterations[index]), y = known.map((index) => found[key][index]);
    const series = [{ name: label, color: 1, x, y }];
    if (key === "times_s" && found.reference_s !== null && x.length) {
      series.push({ name: "at full clocks", color: 5, x: [x[0], x[x.length - 1]], y: [found.reference_s, found.reference_s] });
    }
    charts.line(place, {
      description: `${label} of ${x.length} points from iteration ${x[0]} to ${x[x.length - 1]}; the table below has the numbers`,
      x: { label: "iteration", unit: "" }, y: { label, unit }, series, table: true, height: 200,
    });
  }

  /** Adds the table of a kind of computation when it is opened: it may have thousands of rows. */
  function numbers(details) {
    details.addEventListener("toggle", () => {
      const rows = data.curves.filter((each) => each.computation === details.dataset.computation)
        .flatMap((each) => each.points.map((point) => [String(each.stage), point.clock, point.time_s, point.energy_j]));
      details.append(charts.table(["stage", data.unit, "time (s)", "energy (J)"], rows).querySelector(".scroll"));
    }, { once: true });
  }

  /** Draws small charts a few at a time, so that the page answers meanwhile; all of them before the page is printed. */
  function inTurn(draws) {
    const some = (count) => draws.splice(0, count).forEach((draw) => draw());
    const next = () => { some(8); if (draws.length) setTimeout(next); };
    setTimeout(next);
    addEventListener("beforeprint", () => some(draws.length));
  }

  if (at("energy-ranks")) {
    energies(at("energy-ranks"), "ranks", "rank", data.where[0].ranks.map((_, rank) => String(rank)));
    if (at("energy-phases")) energies(at("energy-phases"), "phases", "phase", data.phases, 240);
  }
  if (at("frontier")) frontier(at("frontier"), data.frontier);
  data.courses.forEach((found, index) => {
    for (const place of document.querySelectorAll(`[data-course="${index}"]`)) course(place, found, place.dataset.key, place.dataset.label, place.dataset.unit);
  });
  if (at("timelines")) timelines.show(at("timelines"), data.iterations, data.unit);
  if (at("changes")) changes(at("changes"), data.ranks);
  inTurn(data.curves.flatMap((each, index) => at(`curve-${index}`) ? [() => curve(at(`curve-${index}`), each)] : []));
  for (const details of document.querySelectorAll("[data-computation]")) numbers(details);
})();
