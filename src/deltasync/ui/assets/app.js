// The page of a feed. All text goes through textContent: names come from the feed, and anyone may have written them.
"use strict";

const POLL_MS = 2000;
const PHASES = ["plan", "fetch", "decode", "stage", "commit", "pause"];
const CHAIN_VERSIONS = 48;
const $ = (id) => document.getElementById(id);
const embedded = $("report") === null ? null : JSON.parse($("report").textContent);
const details = new Map();
let feed = null;
let charts = [];
let token = null;

// ---- text -------------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const count = (n, noun) => `${whole.format(n)} ${noun}${n === 1 ? "" : "s"}`;

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (bytes >= 1000 && i < units.length - 1) { bytes /= 1000; i += 1; }
  return i === 0 ? `${Math.round(bytes)} B` : `${bytes.toPrecision(3)} ${units[i]}`;
}

function duration(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.0005) return "0 s";
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 60) return `${s < 10 ? Number(s.toPrecision(2)) : Math.round(s)} s`;
  const all = Math.round(s);
  for (const [unit, name, smaller, smallerName] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (all >= unit) {
      const rest = Math.floor((all % unit) / smaller);
      return `${whole.format(Math.floor(all / unit))} ${name}${rest ? ` ${rest} ${smallerName}` : ""}`;
    }
  }
  return `${all} s`;
}

function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const p = 100 * share;
  return `${p === 0 ? "0" : p >= 10 ? p.toFixed(1) : p >= 0.01 ? p.toPrecision(2) : p.toExponential(0)} %`;
}

const ratio = (part, all) => (part && all ? `${whole.format(Number((all / part).toPrecision(3)))} times less than a full copy` : "");
const clock = (unix) => new Date(1000 * unix).toISOString().replace("T", " ").slice(0, 19) + " UTC";
const density = (v) => (v.changed === null || !v.elements ? null : v.changed / v.elements);

// ---- elements ---------------------------------------------------------------------------------------------------

function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") element.className = value;
    else if (value !== null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function svg(name, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** Replace the content of an element, unless it is the same; the link that has the focus keeps it. */
const shown = new Map();
function show(id, key, make) {
  const text = JSON.stringify(key);
  if (shown.get(id) === text) return;
  shown.set(id, text);
  const place = $(id);
  const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  place.replaceChildren(...make());
  if (focused !== null) [...place.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
}

function table(columns, rows, caption) {
  const head = el("tr", {}, ...columns.map(([name, isNumber]) => el("th", { scope: "col", class: isNumber ? "num" : "" }, name)));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell, i) => {
    const attributes = { class: columns[i][1] ? "num" : "" };
    return i === 0 ? el("th", { scope: "row", ...attributes }, cell) : el("td", attributes, cell);
  })));
  return el("table", {}, el("caption", { class: "visually-hidden" }, caption), el("thead", {}, head), el("tbody", {}, ...body));
}

// ---- overview ---------------------------------------------------------------------------------------------------

function renderState() {
  const state = $("state");
  const [text, kind] = embedded ? [`Report of ${clock(feed.read_unix_s)}`, "plain"]
    : feed.error ? ["Store unreachable", "bad"]
    : feed.versions.length === 0 ? ["Waiting for a version", "warn"]
    : feed.ended ? ["Ended", "plain"] : ["Live", "good"];
  if (state.textContent !== text) state.textContent = text;
  state.className = `pill ${kind}`;
  $("feed-url").textContent = feed.url;
  $("feed-url").title = feed.url;
  const version = feed.head === null ? "" : `version ${feed.head} · `;
  document.title = `${version}${feed.url.split("/").filter(Boolean).pop() || "feed"} · deltasync`;
  const sampled = feed.stride > 1 ? ` Before version ${feed.detail_from}, charts show every ${feed.stride}th version.` : "";
  $("footer").textContent = `Read ${clock(feed.read_unix_s)}, from manifests, indexes and heartbeats alone.${sampled}`;
}

function renderError() {
  const error = feed === null ? null : feed.error;
  $("error").hidden = !error;
  show("error", error, () => !error ? [] : [
    el("strong", {}, `The feed cannot be read since ${clock(error.since_unix_s)}: ${error.message}`),
    el("div", { class: "hint" }, `${error.hint ? `${error.hint}. ` : ""}What is shown below is what was read last.`),
  ]);
}

function renderAlerts() {
  show("alerts", feed.alerts, () => feed.alerts.map((alert) =>
    el("div", { class: `alert ${alert.level}`, "data-kind": alert.kind },
      el("strong", {}, el("span", { class: "alert-level" }, alert.level), alert.message),
      el("span", { class: "hint" }, alert.hint))));
}

function renderFigures() {
  const versions = feed.versions, head = versions[versions.length - 1];
  const live = feed.replicas.filter((r) => r.live);
  const current = live.filter((r) => r.lag === 0).length;
  const kept = feed.head === null ? 0 : feed.head + 1 - feed.floor;
  const recent = versions.filter((v) => v.version >= feed.detail_from && v.changed !== null);
  const mean = recent.length ? recent.reduce((sum, v) => sum + density(v), 0) / recent.length : null;
  const copies = feed.full_bytes ? `${size(kept * feed.full_bytes)} as full copies of ${count(kept, "version")}` : "";
  const figures = [
    ["Head", head ? `v${whole.format(head.version)}` : "–", head ? `${head.step === null ? "" : `step ${whole.format(head.step)}, `}${duration(feed.read_unix_s - head.created_unix_s)} ago` : "nothing was published yet"],
    ["Pace", feed.versions_per_minute === null ? "–" : `${Number(feed.versions_per_minute.toPrecision(3))} /min`, feed.interval_s === null ? "" : `a version every ${duration(feed.interval_s)}`],
    ["Bytes per version", size(feed.delta_bytes), ratio(feed.delta_bytes, feed.full_bytes)],
    ["Stored", `${feed.stored_is_cut ? "> " : ""}${size(feed.stored_bytes)}`, [`${count(feed.stored_payloads, "payload")}`, copies].filter(Boolean).join("; ")],
    ["Changed per version", percent(mean), head && head.changed !== null ? `${percent(density(head))} in the newest` : ""],
    ["Replicas", `${current} of ${live.length}`, `at the newest version${feed.replicas.length > live.length ? `; ${feed.replicas.length - live.length} silent` : ""}`],
  ];
  show("figures", figures, () => figures.map(([name, value, more]) =>
    el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, el("div", { class: "value" }, value), el("div", { class: "more" }, more)))));
}

function renderChain() {
  const versions = feed.versions.filter((v) => v.version >= feed.detail_from).slice(-CHAIN_VERSIONS);
  const first = versions.length ? versions[0].version : 0;
  const anchors = new Map(feed.anchors);
  const skips = feed.skips.filter(([start, end]) => start >= first && end <= feed.head);
  const damaged = new Set(feed.damages.map((d) => d.version));
  const serving = new Map();
  for (const r of feed.replicas.filter((r) => r.live && r.version !== null)) {
    const at = serving.get(r.version) || { count: 0, bad: false };
    serving.set(r.version, { count: at.count + 1, bad: at.bad || r.digest_equal === false });
  }
  const pinned = new Map();
  for (const [version, name] of feed.pins) pinned.set(version, [...(pinned.get(version) || []), name]);
  const older = [...serving].filter(([v]) => v < first).reduce((sum, [, at]) => sum + at.count, 0);
  const key = [versions.map((v) => [v.version, v.kind, v.version < feed.floor]), [...anchors], skips, feed.pins, [...damaged], [...serving], older];
  show("chain", key, () => {
    if (!versions.length) return [el("p", { class: "note" }, "No version yet.")];
    const step = 26, widest = Math.max(0, ...skips.map(([a, b]) => b - a));
    const top = 14 + Math.min(90, widest * 3), height = top + 60;
    const x = (v) => 24 + step * (v - first);
    const picture = svg("svg", { width: x(feed.head) + 24, height, role: "img", "aria-labelledby": "chain-text" });
    const marks = [...serving].filter(([v]) => v >= first).map(([v, at]) => `${count(at.count, "replica")} at ${v}`);
    picture.append(svg("title", { id: "chain-text" },
      `Versions ${first} to ${feed.head}; anchors at ${versions.filter((v) => v.kind !== "delta" || anchors.has(v.version)).map((v) => v.version).join(", ") || "none"}; `
      + `${count(skips.length, "skip")}; pins: ${feed.pins.map(([v, name]) => `${name} at ${v}`).join(", ") || "none"}; ${marks.join(", ") || "no live replica"}.`));
    picture.append(svg("line", { x1: x(first), x2: x(feed.head), y1: top, y2: top, class: "chain-line" }));
    for (const [start, end] of skips) {
      const rise = Math.min(90, (end - start) * 3);
      picture.append(svg("path", { d: `M ${x(start)} ${top - 8} C ${x(start)} ${top - 8 - rise}, ${x(end)} ${top - 8 - rise}, ${x(end)} ${top - 8}`, class: "skip-arc" }));
    }
    for (const v of versions) {
      const pruned = v.version < feed.floor && !pinned.has(v.version) ? " node-pruned" : "";
      const kind = damaged.has(v.version) ? "damaged" : v.kind;
      picture.append(v.kind === "delta"
        ? svg("circle", { cx: x(v.version), cy: top, r: 5, class: `node-${kind}${pruned}` })
        : svg("rect", { x: x(v.version) - 7, y: top - 7, width: 14, height: 14, rx: 3, class: `node-${kind}${pruned}` }));
      if (v.kind === "delta" && anchors.has(v.version)) picture.append(svg("rect", { x: x(v.version) - 8, y: top - 8, width: 16, height: 16, rx: 4, class: "ring" }));
      if (v.version % 5 === 0 || v.version === feed.head) {
        if (v.version === feed.head || feed.head - v.version > 1) picture.append(svg("text", { x: x(v.version), y: top + 24, class: "chain-text" }, String(v.version)));
      }
      if (pinned.has(v.version)) {
        const mark = svg("path", { d: `M ${x(v.version)} ${top - 8} l -5 -9 h 10 z`, class: "pin-mark" });
        mark.append(svg("title", {}, pinned.get(v.version).join(", ")));
        picture.append(mark);
      }
      const at = serving.get(v.version);
      if (at) {
        const bad = at.bad ? " bad" : "";
        picture.append(svg("rect", { x: x(v.version) - 11, y: top + 34, width: 22, height: 20, rx: 10, class: `replica-mark${bad}` }));
        picture.append(svg("text", { x: x(v.version), y: top + 48, class: `replica-count${bad}` }, String(at.count)));
      }
    }
    const parts = [picture];
    if (older) parts.push(el("p", { class: "note" }, `${count(older, "replica")} on older versions than these.`));
    const before = [...pinned].filter(([v]) => v < first);
    if (before.length) parts.push(el("p", { class: "note" }, `Pinned before these: ${before.map(([v, names]) => `v${whole.format(v)} (${names.join(", ")})`).join(", ")}.`));
    requestAnimationFrame(() => { $("chain").scrollLeft = $("chain").scrollWidth; });
    return parts;
  });
  show("chain-legend", 0, () => [["delta", "delta"], ["anchor", "anchor"], ["skip", "skip"], ["pin", "pinned"], ["replica", "live replicas"], ["damaged", "damaged"]]
    .map(([kind, text]) => el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text)));
}

function renderReplicas() {
  const wanted = $("filter").value.trim().toLowerCase();
  const rows = feed.replicas.filter((r) => r.id.toLowerCase().includes(wanted));
  show("replicas", rows, () => {
    if (!rows.length) return [el("p", { class: "note" }, feed.replicas.length ? "No replica has such a name." : "No replica has written a heartbeat.")];
    const columns = [["Replica"], ["Version", true], ["Behind", true], ["Behind by", true], ["Heartbeat", true], ["State"], ["Bits"], ["Proved"], ["Last move"], ["Engine"]];
    const made = table(columns, rows.map((r) => [
      r.id,
      r.version === null ? "–" : whole.format(r.version),
      r.lag === null ? "–" : whole.format(r.lag),
      r.lag_s === null ? "–" : duration(r.lag_s),
      `${duration(Math.max(1, r.age_s))} ago`,
      !r.live ? pill("silent", "plain") : r.lag === null ? pill("starting", "plain") : r.lag > feed.behind_versions ? pill("behind", "warn") : r.lag > 0 ? pill("catching up", "plain") : pill("current", "good"),
      r.digest_equal === null ? "not known" : r.digest_equal ? pill("equal", "good") : pill("DIFFERENT", "bad"),
      r.proved_version === null || r.proved_age_s === null ? "–" : `v${whole.format(r.proved_version)}, ${duration(r.proved_age_s)} ago`,
      phases(r.seconds),
      r.engine || "–",
    ]), "Replicas by their heartbeats");
    return [made];
  });
  $("replicas-note").textContent = feed.older_replicas ? `${count(feed.older_replicas, "replica")} with older heartbeats are not shown.` : "";
}

const pill = (text, kind) => el("span", { class: `pill ${kind}` }, text);

function phases(seconds) {
  const known = PHASES.filter((phase) => seconds[phase] !== undefined);
  // The pause is a part of the commit.
  const parts = known.filter((phase) => phase !== "pause");
  const total = parts.reduce((sum, phase) => sum + seconds[phase], 0);
  if (!known.length) return "–";
  const text = known.map((phase) => `${phase} ${duration(seconds[phase])}`).join(", ");
  const bar = el("span", { class: "phases", "aria-hidden": "true", title: text });
  for (const phase of parts) {
    const part = el("span", { class: `ph${PHASES.indexOf(phase)}` });
    part.style.width = `${total ? (100 * seconds[phase]) / total : 0}%`;
    bar.append(part);
  }
  return el("div", { title: text }, bar, el("span", { class: "phase-text" }, `${duration(total)}${seconds.pause === undefined ? "" : `, pause ${duration(seconds.pause)}`}`),
    el("span", { class: "visually-hidden" }, `: ${text}`));
}

function renderVersions() {
  const anchors = new Map(feed.anchors);
  const rows = feed.versions.slice(-20).reverse();
  show("versions", [rows, rows.map((v) => anchors.get(v.version)), feed.floor], () => [table(
    [["Version"], ["Kind"], ["Step", true], ["Changed", true], ["Share", true], ["Bytes", true], ["Anchor", true], ["Committed"]],
    rows.map((v) => [
      !embedded || String(v.version) in embedded.details ? el("a", { href: `#/v/${v.version}` }, String(v.version)) : String(v.version),
      v.version < feed.floor ? `${v.kind}, pruned` : v.kind,
      v.step === null ? "–" : whole.format(v.step),
      v.changed === null ? "all" : whole.format(v.changed),
      percent(density(v)),
      size(v.bytes),
      anchors.has(v.version) ? size(anchors.get(v.version)) : "–",
      clock(v.created_unix_s),
    ]), "The newest versions; each leads to its page")]);
}

// ---- charts -----------------------------------------------------------------------------------------------------

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function series() {
  const versions = feed.versions, deltas = versions.filter((v) => v.changed !== null);
  const gaps = [];
  for (let i = 1; i < versions.length; i += 1) {
    gaps.push([versions[i].version, (versions[i].created_unix_s - versions[i - 1].created_unix_s) / (versions[i].version - versions[i - 1].version)]);
  }
  return [
    ["chart-bytes", deltas.map((v) => [v.version, v.bytes]), "delta", size, "--p1"],
    ["chart-density", deltas.map((v) => [v.version, density(v)]), "share", percent, "--p2"],
    ["chart-pace", gaps.map(([v, s]) => [v, Math.max(0, s)]), "seconds", duration, "--p3"],
  ];
}

function renderCharts() {
  const all = series();
  if (charts.length) {
    charts.forEach((chart, i) => {
      const points = all[i][1], last = charts[i].lastText, text = `${points.length} ${points.length ? points[points.length - 1] : ""}`;
      if (last !== text) { chart.plot.setData(columns(points)); describe(...all[i]); chart.lastText = text; }
    });
    return;
  }
  charts = all.map(([id, points, label, text, line]) => {
    const place = $(id), grid = { stroke: colour("--line"), width: 1 }, soft = colour("--soft");
    place.setAttribute("role", "img");
    describe(id, points, label, text);
    const plot = new uPlot({
      width: Math.max(200, place.clientWidth), height: 180, legend: { live: true }, cursor: { y: false, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, high > 0 ? 1.08 * high : 1] } },
      axes: [
        { stroke: soft, grid, ticks: grid, size: 28, values: (u, ticks) => ticks.map((t) => (Number.isInteger(t) ? whole.format(t) : "")) },
        { stroke: soft, grid, ticks: grid, size: 68, values: (u, ticks) => ticks.map((t) => text(t)) },
      ],
      series: [
        { label: "version", value: (u, v) => (v === null ? "–" : whole.format(v)) },
        { label, stroke: colour(line), width: 1.75, fill: `${colour(line)}1f`, points: { show: points.length < 40, size: 4 }, value: (u, v) => (v === null ? "–" : text(v)) },
      ],
    }, columns(points), place);
    return { plot, lastText: `${points.length} ${points.length ? points[points.length - 1] : ""}` };
  });
}

const columns = (points) => [points.map((p) => p[0]), points.map((p) => p[1])];

/** A chart in words, for those who cannot see it. */
function describe(id, points, label, text) {
  const values = points.map((p) => p[1]);
  $(id).setAttribute("aria-label", !points.length ? `${label}: no data`
    : `${label} by version, from ${points[0][0]} to ${points[points.length - 1][0]}: least ${text(Math.min(...values))}, most ${text(Math.max(...values))}, newest ${text(values[values.length - 1])}`);
}

function resetCharts() {
  charts.forEach((chart) => chart.plot.destroy());
  charts = [];
}

// ---- a version --------------------------------------------------------------------------------------------------

async function renderVersion(version) {
  const place = $("version");
  if (place.dataset.version === String(version) && place.childElementCount) return;
  place.dataset.version = String(version);
  const crumbs = el("nav", { class: "crumbs", "aria-label": "Versions" }, el("a", { href: "#/" }, "← All versions"));
  const last = feed === null || feed.head === null ? version : feed.head;
  if (version > 0 && (!embedded || String(version - 1) in embedded.details)) crumbs.append(el("a", { href: `#/v/${version - 1}` }, `Version ${version - 1}`));
  if (version < last && (!embedded || String(version + 1) in embedded.details)) crumbs.append(el("a", { href: `#/v/${version + 1}` }, `Version ${version + 1}`));
  place.replaceChildren(crumbs, el("h1", {}, `Version ${version}`), el("p", { class: "note", role: "status" }, "Reading its index …"));
  const detail = await readDetail(version);
  if (place.dataset.version !== String(version)) return;
  place.lastElementChild.remove();
  if (detail.error) {
    place.append(el("p", { class: "banner", role: "alert" }, detail.error.message));
    delete place.dataset.version;
    return;
  }
  const m = detail.manifest;
  const facts = [
    ["Kind", m.kind], ["Step", m.step === null ? "–" : whole.format(m.step)], ["Committed", clock(m.created_unix_s)],
    ["Changed", m.changed === null ? "all weights" : `${whole.format(m.changed)} of ${whole.format(m.elements)} elements (${percent(m.changed / m.elements)})`],
    ["Bytes", `${size(m.payload_bytes)} in ${count(m.payloads.length, "payload")}${m.changed ? `, ${((8 * m.payload_bytes) / m.changed).toFixed(2)} bits for each change` : ""}`],
    ["Against a full copy", detail.full_bytes ? `${size(detail.full_bytes)}: ${ratio(m.payload_bytes, detail.full_bytes) || "–"}` : "–"],
    ["Steps in ulps", detail.steps.length ? `${stepShares(detail.steps).filter(([, share]) => share >= 0.0005).map(([name, share]) => `${name}: ${percent(share)}`).join(", ")}${total(detail.steps) < 0.999 * m.changed ? ` (of ${percent(total(detail.steps) / m.changed)} of the changes)` : ""}` : "–"],
    ["Anchor", detail.anchor_bytes === null ? "–" : size(detail.anchor_bytes)],
    ["Codecs", detail.codecs.map((c) => `${c.codec}: ${count(c.blocks, "block")}, ${size(c.bytes)}`).join("; ") || "–"],
    ["Digest", m.digest], ["Writer", m.writer], ...Object.entries(m.extra),
  ];
  place.append(el("section", { class: "card" }, el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))));
  if (detail.cells.length) place.append(heatCard(detail));
  else place.append(el("p", { class: "note" }, m.kind === "delta" ? "Nothing changed in this version." : "This version has all weights: there is no change to show by layer."));
  if (detail.unread_payloads) place.append(el("p", { class: "note" }, `${count(detail.unread_payloads, "payload")} more were not read.`));
  $("main").focus({ preventScroll: true });
}

async function readDetail(version) {
  if (embedded) return embedded.details[String(version)] || { error: { message: `This report has no details of version ${version}.` } };
  if (!details.has(version)) {
    const found = await request(`api/versions/${version}`);
    if (found === null || found.error) return found || { error: { message: "The server does not respond." } };
    if (details.size > 50) details.delete(details.keys().next().value);
    details.set(version, found);
  }
  return details.get(version);
}

const total = (steps) => steps.reduce((sum, number) => sum + number, 0);

/** Shares of changes by the size of their step in units in the last place: 1, 2, 3 to 4, 5 to 8, and so on. */
const stepShares = (steps) => steps.map((number, i) => [i < 2 ? `${i + 1}` : `${whole.format(2 ** (i - 1) + 1)}–${whole.format(2 ** i)}`, number / total(steps)]);

/** The size that 99 of 100 steps do not exceed. */
function stepBound(steps) {
  let sum = 0;
  return 2 ** steps.findIndex((number) => (sum += number) >= 0.99 * total(steps));
}

const MEASURES = {
  share: ["share of elements that changed", (cell) => cell.changed / cell.elements, percent],
  bits: ["bits per changed element", (cell) => (cell.changed ? (8 * cell.bytes) / cell.changed : null), (v) => v.toFixed(1)],
  steps: ["share of changes by more than 1 ulp", (cell) => (cell.steps.length ? 1 - cell.steps[0] / total(cell.steps) : null), percent],
  ulps: ["ulps that 99 % of the changes stay within", (cell) => (cell.steps.length ? stepBound(cell.steps) : null), (v) => whole.format(v)],
};

function heatCard(detail) {
  const choice = el("select", { id: "measure" }, ...Object.entries(MEASURES).map(([key, [name]]) => el("option", { value: key }, name)));
  const place = el("div", { class: "scroll", role: "group", tabindex: "0", "aria-label": "Heat map by layer and kind of tensor" });
  const draw = () => place.replaceChildren(...heat(detail.cells, ...MEASURES[choice.value]));
  choice.addEventListener("change", draw);
  draw();
  const shared = detail.cells.some((cell) => !cell.exact);
  return el("section", { class: "card", "aria-labelledby": "heat-title" },
    el("div", { class: "card-head" }, el("h2", { id: "heat-title" }, "What changed, by layer and kind of tensor"), el("label", {}, el("span", { class: "visually-hidden" }, "Measure"), choice)),
    place,
    el("p", { class: "note" }, shared ? "≈: the index counts changes by block, and blocks here reach over several cells; each cell has its share by elements." : "Changes are exact, from the index.",
      " Steps in units in the last place (ulps) come from the tables that blocks are coded with, to about one part in eight."));
}

function heat(cells, name, measure, text) {
  const isNumbered = (cell) => /(^|\.)\d+$/.test(cell.layer);
  const rows = [...new Set(cells.filter(isNumbered).map((c) => c.layer))];
  const kinds = [...new Set(cells.filter(isNumbered).map((c) => c.kind))];
  const at = new Map(cells.map((c) => [`${c.layer}\n${c.kind}`, c]));
  const values = cells.filter((c) => c.elements).map(measure).filter((v) => v !== null && v > 0);
  const high = Math.max(...values, Number.MIN_VALUE), low = Math.max(Math.min(...values, high), high / 1e4);
  const level = (v) => (v === null || v <= 0 ? 0 : high === low ? 6 : Math.max(1, Math.min(9, 1 + Math.round((8 * Math.log(v / low)) / Math.log(high / low)))));
  const td = (cell) => {
    if (!cell || !cell.elements) return el("td", { class: "none" }, "");
    const value = measure(cell);
    const title = `${cell.layer} ${cell.kind}: ${cell.exact ? "" : "about "}${whole.format(Math.round(cell.changed))} of ${whole.format(cell.elements)} elements changed`;
    return el("td", { class: `h${level(value)}${cell.exact ? "" : " approx"}`, title }, value === null ? "–" : text(value));
  };
  const parts = [];
  const prefix = rows.length && rows.every((r) => r.replace(/\d+$/, "") === rows[0].replace(/\d+$/, "")) ? rows[0].replace(/\d+$/, "") : "";
  if (rows.length) {
    parts.push(el("table", { class: "heat" }, el("caption", { class: "visually-hidden" }, `${name}, by layer and kind`),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, prefix ? prefix.replace(/\.$/, "") : "layer"), ...kinds.map((k) => el("th", { scope: "col" }, el("span", {}, k.replace(/\.weight$/, "")))))),
      el("tbody", {}, ...rows.map((r) => el("tr", {}, el("th", { scope: "row" }, r.slice(prefix.length)), ...kinds.map((k) => td(at.get(`${r}\n${k}`))))))));
  }
  const others = cells.filter((c) => !isNumbered(c) && c.elements);
  if (others.length) {
    parts.push(el("table", { class: "heat" }, el("caption", { class: "visually-hidden" }, `${name}, outside the layers`),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "outside the layers"), el("th", { scope: "col" }, "changed"))),
      el("tbody", {}, ...others.map((c) => el("tr", {}, el("th", { scope: "row" }, c.layer === c.kind ? c.layer : `${c.layer}.${c.kind}`), td(c))))));
  }
  return parts;
}

// ---- requests, routes, theme ------------------------------------------------------------------------------------

async function request(path) {
  const used = token;
  try {
    const response = await fetch(path, { headers: used ? { Authorization: `Bearer ${used}` } : {}, cache: "no-store" });
    // A late answer to the token before this one says nothing about this one.
    if (response.status === 401) { if (used === token) askToken(); return null; }
    return await response.json();
  } catch { return null; }
}

function askToken() {
  $("token-form").hidden = false;
  $("overview").hidden = true;
  $("version").hidden = true;
  $("state").textContent = "Token needed";
}

function route() {
  const match = /^#\/v\/(\d{1,15})$/.exec(location.hash);
  if (location.hash === "#main") return;
  if (feed === null) return;
  $("token-form").hidden = true;
  $("overview").hidden = match !== null;
  $("version").hidden = match === null;
  if (match) renderVersion(Number(match[1]));
  else { $("version").removeAttribute("data-version"); render(); }
}

function render() {
  renderState();
  renderError();
  if ($("overview").hidden) return;
  for (const draw of [renderAlerts, renderFigures, renderChain, renderReplicas, renderVersions, renderCharts]) draw();
}

async function poll() {
  if (!document.hidden || feed === null) {
    const found = await request("api/feed");
    if (found !== null && !found.loading) {
      const isFirst = feed === null;
      feed = found;
      if (isFirst) route();
      render();
    } else if (found === null && feed !== null && $("token-form").hidden) {
      feed.error = feed.error || { message: "the process that serves this page does not respond", hint: "start `deltasync ui` again", since_unix_s: Date.now() / 1000 };
      render();
    }
  }
  setTimeout(poll, POLL_MS);
}

const THEMES = { "": "Auto", light: "Light", dark: "Dark" };
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  $("theme").textContent = THEMES[theme];
  $("theme").setAttribute("aria-label", `Colour theme: ${THEMES[theme]}`);
  resetCharts();
  if (feed !== null && !$("overview").hidden) renderCharts();
}

function start() {
  const given = /^#token=(.+)$/.exec(location.hash);
  try {
    if (given) sessionStorage.setItem("deltasync-token", decodeURIComponent(given[1]));
    token = sessionStorage.getItem("deltasync-token");
    setTheme(THEMES[localStorage.getItem("deltasync-theme")] ? localStorage.getItem("deltasync-theme") : "");
  } catch { if (given) token = given[1]; }
  // The token does not stay in the address, which may be copied.
  if (given) history.replaceState(null, "", "#/");
  $("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES), next = names[(names.indexOf(document.documentElement.dataset.theme || "") + 1) % names.length];
    setTheme(next);
    try { localStorage.setItem("deltasync-theme", next); } catch { /* Not kept. */ }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme || ""));
  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    token = $("token").value;
    try { sessionStorage.setItem("deltasync-token", token); } catch { /* Not kept. */ }
    request("api/feed").then((found) => { if (found && !found.loading) { feed = found; route(); render(); } });
  });
  $("filter").addEventListener("input", () => feed !== null && renderReplicas());
  addEventListener("hashchange", route);
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => charts.forEach((chart, i) => {
      const place = $(["chart-bytes", "chart-density", "chart-pace"][i]);
      chart.plot.setSize({ width: Math.max(200, place.clientWidth), height: 180 });
    }), 100);
  });
  if (embedded) { feed = embedded.feed; route(); render(); } else poll();
}

start();
