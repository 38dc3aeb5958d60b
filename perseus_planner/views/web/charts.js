// Draws the charts of the planner's pages as SVG, coloured by the variables of theme.css. Plain JavaScript, no build step.
//
// charts.line(place, chart) and charts.bars(place, chart) fill `place` with a chart, its legend and, if asked for, a table
// of its numbers. They redraw when the width of `place` changes; call them again to update. Texts become text nodes, and
// no style or handler attribute is set, so the charts work under a strict content security policy.

"use strict";

const charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const NARROW = 480; // px; narrower charts are lower and have fewer ticks

  // --- Elements ------------------------------------------------------------------------------------------------------

  /** Returns an HTML element with attributes and children (elements or texts). */
  function html(tag, attributes = {}, ...children) {
    return filled(document.createElement(tag), attributes, children);
  }

  /** Returns an SVG element with attributes and children (elements or texts). */
  function svg(tag, attributes = {}, ...children) {
    return filled(document.createElementNS(SVG, tag), attributes, children);
  }

  function filled(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  // --- Numbers -------------------------------------------------------------------------------------------------------

  /** Writes a number with thousands separated, and `digits` digits after the point, or three digits in all. */
  function number(value, digits = null) {
    if (value === null || !Number.isFinite(value)) return "–";
    if (digits === null && !Number.isInteger(value)) return value.toLocaleString("en-US", { maximumSignificantDigits: 3 });
    return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(digits ?? 0, 12) });
  }

  /** Writes a number with its unit, such as "1,234 W"; an empty unit is left out. */
  function quantity(value, unit = "", digits = null) {
    return unit ? `${number(value, digits)}\u00a0${unit}` : number(value, digits);
  }

  /** Returns about `count` round numbers from low to high, and how many digits after the point they need. */
  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(1, count);
    if (!(rough > 0)) return { values: [low], digits: 2 };
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const values = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) values.push(index * step + 0); // + 0 avoids -0
    return { values, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  }

  /** Returns `ticks`, and more than asked for if there would be fewer than two: one tells nothing of the scale. */
  function someTicks(low, high, count) {
    let found = ticks(low, high, count);
    for (let more = count + 1; found.values.length < 2 && more <= count + 6; more += 1) found = ticks(low, high, more);
    return found;
  }

  /** Returns the least and greatest number, with a margin. */
  function range(values, margin = 0.05) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (value === null || !Number.isFinite(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) return [0, 1];
    const room = (high - low) * margin || Math.abs(high) * margin || 1;
    return [low - room, high + room];
  }

  // --- Shared by both kinds of chart --------------------------------------------------------------------------------

  const drawn = new WeakMap(); // place -> how to redraw it

  /** Draws now, and again whenever the width of the place changes. */
  function kept(place, draw) {
    const first = !drawn.has(place);
    drawn.set(place, { draw, width: 0 });
    redraw(place);
    if (first) new ResizeObserver(() => redraw(place)).observe(place);
  }

  function redraw(place) {
    const state = drawn.get(place);
    const width = Math.round(place.clientWidth);
    if (width === 0 || width === state.width) return;
    state.width = width;
    const open = place.querySelector("details")?.open ?? false; // an open table stays open
    place.classList.add("chart");
    place.replaceChildren(...state.draw(Math.max(width, 140)).filter((part) => part !== null));
    if (open && place.querySelector("details")) place.querySelector("details").open = true;
  }

  function axisText(axis) {
    return axis.unit ? `${axis.label} (${axis.unit})` : axis.label;
  }

  /** Returns the frame of a chart: its coordinates, grid, ticks and axis labels. */
  function frame(width, chart, xRange, yRange, xTicks) {
    const narrow = width < NARROW;
    const height = chart.height ?? (narrow ? 280 : 340);
    const yTicks = someTicks(...yRange, chart.compact ? 3 : narrow ? 4 : 6);
    const texts = yTicks.values.map((value) => number(value, yTicks.digits));
    const left = 14 + 7 * Math.max(...texts.map((text) => text.length));
    const box = chart.compact ? { left, right: width - 6, top: 8, bottom: height - 22 } : { left, right: width - 14, top: 28, bottom: height - 44 };
    const x = (value) => box.left + ((value - xRange[0]) / (xRange[1] - xRange[0])) * (box.right - box.left);
    const y = (value) => box.bottom - ((value - yRange[0]) / (yRange[1] - yRange[0])) * (box.bottom - box.top);
    const parts = chart.compact ? [] : [svg("text", { x: 0, y: 12 }, axisText(chart.y))];
    yTicks.values.forEach((value, index) => {
      parts.push(svg("line", { class: "gridline", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }));
      parts.push(svg("text", { x: box.left - 7, y: y(value) + 4, "text-anchor": "end" }, texts[index]));
    });
    parts.push(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    for (const { at, text } of xTicks) {
      parts.push(svg("line", { class: "axis", x1: x(at), x2: x(at), y1: box.bottom, y2: box.bottom + 4 }));
      parts.push(svg("text", { x: x(at), y: box.bottom + 18, "text-anchor": "middle" }, text));
    }
    if (!chart.compact) parts.push(svg("text", { x: box.right, y: height - 6, "text-anchor": "end" }, axisText(chart.x)));
    const at = (px) => xRange[0] + ((px - box.left) / (box.right - box.left)) * (xRange[1] - xRange[0]);
    return { width, height, box, x, y, at, parts, narrow };
  }

  function picture(plane, chart, parts) {
    const attributes = { viewBox: `0 0 ${plane.width} ${plane.height}`, role: "img", "aria-label": chart.description };
    return svg("svg", attributes, ...plane.parts, ...parts);
  }

  /** Returns the path of a shape around a point: circle, square, diamond, triangle or cross. */
  function shape(kind, x, y, size = 6) {
    const s = size;
    if (kind === "square") return `M${x - s} ${y - s}h${2 * s}v${2 * s}h${-2 * s}z`;
    if (kind === "diamond") return `M${x} ${y - 1.3 * s}L${x + 1.3 * s} ${y}L${x} ${y + 1.3 * s}L${x - 1.3 * s} ${y}z`;
    if (kind === "triangle") return `M${x} ${y - 1.2 * s}L${x + 1.15 * s} ${y + s}L${x - 1.15 * s} ${y + s}z`;
    if (kind === "cross") {
      const t = s / 2.4;
      return `M${x - t} ${y - s}h${2 * t}v${s - t}h${s - t}v${2 * t}h${t - s}v${s - t}h${-2 * t}v${t - s}h${t - s}v${-2 * t}h${s - t}z`;
    }
    return `M${x - s} ${y}a${s} ${s} 0 1 0 ${2 * s} 0a${s} ${s} 0 1 0 ${-2 * s} 0z`;
  }

  function legend(entries) {
    return html("ul", { class: "legend" }, ...entries.map(({ color, sign, text }) =>
      html("li", {}, svg("svg", { viewBox: "0 0 22 12", class: `series-${color}`, "aria-hidden": "true" }, sign), html("span", { class: "text" }, text))));
  }

  /** Returns a foldable table of a chart's numbers; heads are texts, rows are lists of texts or numbers. */
  function table(heads, rows, name = "The numbers") {
    const cell = (value) => typeof value === "number" || value === null ? html("td", { class: "number" }, number(value)) : html("td", {}, value);
    const numeric = heads.map((_, column) => rows.length > 0 && rows.every((row) => typeof row[column] !== "string"));
    return html("details", {}, html("summary", {}, name),
      html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${name}: ${heads.filter(Boolean).join(", ")}` },
        html("table", {},
          html("thead", {}, html("tr", {}, ...heads.map((head, column) => html("th", { scope: "col", class: numeric[column] ? "number" : null }, head)))),
          html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map(cell)))))));
  }

  // --- Lines ---------------------------------------------------------------------------------------------------------

  /** Draws lines and points.
   *
   * chart: {
   *   description: text for screen readers,
   *   x: {label, unit, range?: [low, high]}, y: the same,
   *   series: [{name, color: 1..8, x: [..], y: [..], line?: true, dashed?: false, dots?: false, errors?: [..] (+- on y),
   *             xErrors?: [..] (+- on x)}],
   *   marks?: (the most important first) [{name, color: 1..8, shape, x, y, label?: text beside it, title?: text in the
   *             legend, or null to leave it out, from?: {x, y} previous position, to animate a move}],
   *   events?: [{x, text}], each a dotted line over the whole height,
   *   zoom?: called with the least and greatest x of what the pointer was dragged over,
   *   table?: true for the numbers below, legend?: false to leave it out, height?: px,
   *   compact?: true for one of many small charts, whose axes are described once
   * }
   */
  function line(place, chart) {
    let isNew = true; // animate a move once, not on every resize
    kept(place, (width) => {
      const marks = (chart.marks ?? []).filter((mark) => Number.isFinite(mark.x) && Number.isFinite(mark.y));
      const lows = chart.series.flatMap((each) => (each.errors ?? []).map((error, index) => each.y[index] - error));
      const highs = chart.series.flatMap((each) => (each.errors ?? []).map((error, index) => each.y[index] + error));
      const xRange = chart.x.range ?? range([...chart.series.flatMap((each) => each.x), ...marks.map((mark) => mark.x)]);
      const yRange = chart.y.range ?? range([...chart.series.flatMap((each) => each.y), ...marks.map((mark) => mark.y), ...lows, ...highs]);
      const xTicks = someTicks(...xRange, chart.compact ? 2 : width < NARROW ? 4 : 8);
      const plane = frame(width, chart, xRange, yRange, xTicks.values.map((at) => ({ at, text: number(at, xTicks.digits) })));
      const happened = (chart.events ?? []).filter(({ x }) => x >= xRange[0] && x <= xRange[1]).map(({ x, text }) => svg("path", { class: "event", d: `M${plane.x(x)} ${plane.box.top}V${plane.box.bottom}` }, svg("title", {}, text)));
      const parts = [...happened, ...chart.series.flatMap((each) => curve(plane, each)), ...marked(plane, marks, chart.series, isNew)];
      isNew = false;
      const readout = html("p", { class: "readout", "aria-hidden": "true" }); // for the pointer; the table has the same for everybody
      const image = picture(plane, chart, parts);
      image.addEventListener("pointermove", (event) => { readout.textContent = nearest(image, event, plane, chart, marks); });
      image.addEventListener("pointerleave", () => { readout.textContent = ""; });
      if (chart.zoom) watchDrags(image, plane, chart.zoom);
      const signs = (chart.legend ?? true) ? legend(lineLegend(chart.series, marks)) : null;
      return [image, signs, readout, chart.table ? lineTable(chart, marks) : null];
    });
  }

  function curve(plane, series) {
    const points = series.x.map((x, index) => [plane.x(x), plane.y(series.y[index])]);
    const parts = [];
    if (series.line ?? true) {
      const path = points.map(([x, y], index) => `${index === 0 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`);
      parts.push(svg("path", { class: series.dashed ? "line dashed" : "line", d: path.join("") || null }));
    }
    (series.errors ?? []).forEach((error, index) => {
      const [x] = points[index];
      const [low, high] = [plane.y(series.y[index] - error), plane.y(series.y[index] + error)];
      if (error > 0) parts.push(svg("path", { class: "error", d: `M${x - 3} ${low}h6M${x - 3} ${high}h6M${x} ${low}V${high}` }));
    });
    (series.xErrors ?? []).forEach((error, index) => {
      const y = points[index][1];
      const [low, high] = [plane.x(series.x[index] - error), plane.x(series.x[index] + error)];
      if (error > 0) parts.push(svg("path", { class: "error", d: `M${low} ${y - 3}v6M${high} ${y - 3}v6M${low} ${y}H${high}` }));
    });
    if (series.dots) for (const [x, y] of points) parts.push(svg("circle", { class: "dot", cx: x, cy: y, r: 2.8 }));
    return [svg("g", { class: `series-${series.color}` }, ...parts)];
  }

  /** Returns the marks, each where it belongs; the first is on top and is labelled first. Marks at one place share a label of
   * several lines. Labels keep clear of lines, marks and other labels, with a thin line to marks that are far. */
  function marked(plane, marks, series, moving) {
    const size = 7; // px, of half a mark
    const same = 2; // px; marks that are nearer to each other are at one place
    const spots = marks.map((mark) => ({ mark, x: plane.x(mark.x), y: plane.y(mark.y), texts: [] }));
    for (const { mark, x, y } of spots) {
      if (mark.label) spots.find((other) => Math.hypot(x - other.x, y - other.y) <= same).texts.push(mark.label);
    }
    const taken = spots.map(({ x, y }) => ({ left: x - size, right: x + size, top: y - size, bottom: y + size }));
    const lines = series.flatMap((each) => (each.line ?? true) ? segments(each.x.map((x, index) => [plane.x(x), plane.y(each.y[index])])) : []);
    const groups = spots.map(({ mark, x, y, texts }) => {
      const group = svg("g", { class: `series-${mark.color}` });
      const found = texts.length ? room(plane, { x, y }, 6.6 * Math.max(...texts.map((text) => text.length)), 16 * texts.length, taken, lines) : null;
      if (found !== null) {
        taken.push(found);
        if (found.far) group.append(svg("path", { class: "leader", d: `M${x} ${y}L${Math.min(Math.max(x, found.left), found.right)} ${y < found.top ? found.top : found.bottom}` }));
        group.append(svg("text", { class: "label" }, ...texts.map((text, row) => svg("tspan", { x: found.left, y: found.top + 12 + 16 * row }, text))));
      }
      group.append(svg("path", { class: "mark", d: shape(mark.shape, x, y) }));
      if (moving && mark.from) move(group, plane.x(mark.from.x) - x, plane.y(mark.from.y) - y);
      return group;
    });
    return groups.reverse(); // the last one drawn lies on top
  }

  function segments(points) {
    return points.slice(1).map((point, index) => [...points[index], ...point]);
  }

  /** Animates an element from (dx, dy) to its place, unless the reader prefers reduced motion. */
  function move(element, dx, dy) {
    if (Math.hypot(dx, dy) < 1 || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    element.animate([{ transform: `translate(${dx}px, ${dy}px)` }, { transform: "none" }], { duration: 600, easing: "ease-in-out" });
  }

  /** Returns the nearest free box for a label of `width` and `height` pixels, or null if there is none. */
  function room(plane, { x, y }, width, height, taken, lines) {
    const inside = (box) => box.left >= plane.box.left && box.right <= plane.width && box.top >= 14 && box.bottom <= plane.box.bottom;
    const boxes = [11, 22, 36, 54, 76, 104, 140, 190].flatMap((away) => Array.from({ length: 16 }, (_, turn) => {
      const [dx, dy] = [away * Math.cos((turn - 1) * Math.PI / 8), away * Math.sin((turn - 1) * Math.PI / 8)];
      const left = x + dx - (dx > away / 3 ? 0 : dx < -away / 3 ? width : width / 2);
      const top = y + dy - (dy > away / 3 ? 2 : dy < -away / 3 ? height - 2 : height / 2);
      return { left, right: left + width, top, bottom: top + height, far: away > 22 };
    })).filter((box) => inside(box) && taken.every((other) => apart(box, other)));
    return boxes.find((box) => !lines.some((line) => crosses(line, box))) ?? boxes[0] ?? null;
  }

  function apart(a, b) {
    return a.right < b.left || b.right < a.left || a.bottom < b.top || b.bottom < a.top;
  }

  /** Tells whether a line from (x0, y0) to (x1, y1) touches a box (Liang and Barsky 1984). */
  function crosses([x0, y0, x1, y1], box) {
    let [from, to] = [0, 1];
    for (const [step, room] of [[x0 - x1, x0 - box.left], [x1 - x0, box.right - x0], [y0 - y1, y0 - box.top], [y1 - y0, box.bottom - y0]]) {
      if (step === 0 && room < 0) return false;
      if (step < 0) from = Math.max(from, room / step);
      if (step > 0) to = Math.min(to, room / step);
    }
    return from <= to;
  }

  function lineLegend(series, marks) {
    const ofSeries = series.map((each) => ({
      color: each.color,
      text: each.name,
      sign: (each.line ?? true)
        ? svg("path", { d: "M1 6H21", fill: "none", stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": each.dashed ? "5 4" : null })
        : svg("circle", { cx: 11, cy: 6, r: 3, fill: "currentColor" }),
    }));
    const ofMarks = marks.filter((mark) => mark.title !== null).map((mark) => ({ color: mark.color, text: mark.title ?? mark.name, sign: svg("path", { d: shape(mark.shape, 11, 6, 4), fill: "currentColor" }) }));
    return [...ofSeries, ...ofMarks];
  }

  /** Returns the coordinates of the pointer in the picture. */
  function pointed(image, pointer, plane) {
    const box = image.getBoundingClientRect();
    return [((pointer.clientX - box.left) * plane.width) / box.width, ((pointer.clientY - box.top) * plane.height) / box.height];
  }

  /** Shades what the pointer is dragged over, and calls `zoom` with its range at the end. */
  function watchDrags(image, plane, zoom) {
    const shade = svg("rect", { class: "chosen", y: plane.box.top, height: plane.box.bottom - plane.box.top });
    const px = (event) => Math.min(Math.max(pointed(image, event, plane)[0], plane.box.left), plane.box.right);
    let from = 0;
    const cover = (to) => {
      shade.setAttribute("x", Math.min(from, to));
      shade.setAttribute("width", Math.abs(to - from));
    };
    image.classList.add("zoomable");
    image.addEventListener("pointerdown", (event) => {
      from = px(event);
      cover(from);
      image.append(shade);
      image.setPointerCapture(event.pointerId);
    });
    image.addEventListener("pointermove", (event) => { if (shade.parentNode) cover(px(event)); });
    image.addEventListener("pointercancel", () => shade.remove()); // it scrolls
    image.addEventListener("pointerup", (event) => {
      shade.remove();
      const to = px(event);
      if (Math.abs(to - from) > 5) zoom(plane.at(Math.min(from, to)), plane.at(Math.max(from, to)));
    });
  }

  function nearest(image, pointer, plane, chart, marks) {
    const [px, py] = pointed(image, pointer, plane);
    const event = (chart.events ?? []).find(({ x }) => Math.abs(plane.x(x) - px) < 3);
    if (event) return event.text;
    let best = { distance: 40, text: "" }; // px; points farther away do not count
    const look = (name, x, y, favour) => {
      const distance = Math.hypot(plane.x(x) - px, plane.y(y) - py) - favour;
      if (distance < best.distance) best = { distance, text: `${name}: ${quantity(x, chart.x.unit)}, ${quantity(y, chart.y.unit)}` };
    };
    for (const each of chart.series) each.x.forEach((x, index) => look(each.name, x, each.y[index], 0));
    for (const mark of marks) look(mark.name, mark.x, mark.y, 6);
    return best.text;
  }

  function lineTable(chart, marks) {
    const rows = [...marks.map((mark) => [mark.name, mark.x, mark.y]), ...chart.series.flatMap((each) => each.x.map((x, index) => [each.name, x, each.y[index]]))];
    return table(["curve", axisText(chart.x), axisText(chart.y)], rows);
  }

  // --- Bars ----------------------------------------------------------------------------------------------------------

  /** Draws groups of bars from zero.
   *
   * chart: {description, x: {label, unit}, y: {label, unit}, names: [text of each group],
   *         series: [{name, color: 1..8, y: [one number for each group], onto?: true to stand on the series before it,
   *                   hatched?: true}], table?: boolean, legend?: false to leave it out, height?: px}
   */
  function bars(place, chart) {
    const [bases, stacks] = stacked(chart.series);
    kept(place, (shown) => {
      const width = Math.max(shown, 60 + chart.names.length * (4 + 4 * (Math.max(...stacks) + 1))); // px; what is wider scrolls
      const tops = chart.series.flatMap((each, order) => each.y.map((value, index) => bases[order][index] + value));
      const [low, high] = range([0, ...tops]);
      const few = Math.max(1, Math.ceil((chart.names.length * (6 + 7 * Math.max(...chart.names.map((name) => name.length)))) / width)); // so many names fit side by side
      const xTicks = chart.names.flatMap((text, at) => (at % few === 0 ? [{ at, text }] : []));
      const plane = frame(width, chart, [-0.5, chart.names.length - 0.5], [Math.min(...tops) < 0 ? low : 0, high], xTicks);
      const step = (plane.box.right - plane.box.left) / Math.max(1, chart.names.length);
      const count = Math.max(...stacks) + 1;
      const wide = Math.min(28, (step * 0.8) / count);
      const parts = chart.series.map((each, order) => {
        const fill = each.hatched ? hatching() : null;
        const rects = each.y.map((value, index) => {
          const [from, to] = [plane.y(bases[order][index]), plane.y(bases[order][index] + value)];
          return svg("rect", {
            class: each.hatched ? "bar hatched" : "bar", fill: fill && `url(#${fill.id})`,
            x: plane.x(index) + (stacks[order] - count / 2) * wide, y: Math.min(from, to),
            width: Math.max(1, wide - (wide > 3 ? 1 : 0)), height: Math.abs(from - to),
          });
        });
        return svg("g", { class: `series-${each.color}` }, fill, ...rects);
      });
      const signs = chart.series.map((each) => {
        const fill = each.hatched ? hatching() : null;
        return { color: each.color, text: each.name, sign: svg("g", {}, fill, svg("rect", { class: fill ? "hatched" : null, x: 5, y: 1, width: 12, height: 10, fill: fill ? `url(#${fill.id})` : "currentColor" })) };
      });
      const rows = chart.names.map((name, index) => [name, ...chart.series.map((each) => each.y[index])]);
      const image = picture(plane, chart, parts);
      if (width > shown) image.setAttribute("width", width);
      const drawn = width > shown ? html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": axisText(chart.y) }, image) : image;
      return [drawn, (chart.legend ?? true) ? legend(signs) : null, chart.table ? table([axisText(chart.x), ...chart.series.map((each) => axisText({ label: each.name, unit: chart.y.unit }))], rows) : null];
    });
  }

  /** Returns for each series where its bars begin, and the number of its stack. */
  function stacked(series) {
    const [bases, stacks] = [[], []];
    series.forEach((each, order) => {
      bases.push(each.y.map((_, index) => each.onto ? bases[order - 1][index] + series[order - 1].y[index] : 0));
      stacks.push(order === 0 ? 0 : stacks[order - 1] + (each.onto ? 0 : 1));
    });
    return [bases, stacks];
  }

  let hatchings = 0; // for names that are unique on the page

  function hatching() {
    hatchings += 1;
    return svg("pattern", { id: `hatching-${hatchings}`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("path", { d: "M0 0V5", stroke: "currentColor", "stroke-width": 3 }));
  }

  return { html, svg, number, quantity, ticks, range, table, line, bars };
})();
