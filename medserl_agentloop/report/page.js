"use strict";
// The page of `medserl report`. All text of models and data becomes text nodes: nothing here makes markup of a string.

const ROW_HEIGHT = 24;
const SIGNS = {
  correct_detection: "✓", correct_rejection: "✓", missed_error: "✗", false_positive: "✗",
  invalid_attack: "!", unreadable_assessment: "?", void: "∅",
};
const FILTERED = ["run", "category", "outcome", "invalid", "intended", "judged", "verdict", "error_type", "signal"];
const CROSSED = [["category", "outcome"], ["invalid", "category"], ["judged", "intended"], ["error_type", "outcome"]];
const BY_STEP = ["has_signal", "right", "changed_words", "attacker_tokens", "assessor_tokens"];
const SCATTERED = [
  ["changed_words", "attacker_reward"], ["attacker_tokens", "attacker_reward"], ["assessor_tokens", "assessor_reward"],
];
const DASHES = ["", "6 3", "2 2", "8 3 2 3", "1 3"];
const PALETTE = ["var(--attacker)", "var(--assessor)", "var(--judge)", "var(--correct_rejection)", "var(--invalid_attack)"];

const byId = (id) => document.getElementById(id);
const state = { data: null, shown: [], chosen: -1, wanted: new Map(), plots: { reward: "roles", number: "mean:has_signal", cross: 0 } };

// ---- data ----------------------------------------------------------------------------------------------------------

async function unpack(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

const column = (name) => state.data.columns[name];
const value = (name, game) => {
  const c = column(name);
  return c.words ? c.words[c.codes[game]] : c.values[game];
};

const recent = new Map(); // the last chunks that were opened
async function lines(chunk) {
  if (!recent.has(chunk)) {
    recent.set(chunk, (await unpack("chunk" + chunk)).split("\n"));
    if (recent.size > 8) recent.delete(recent.keys().next().value);
  }
  return recent.get(chunk);
}

async function record(game) {
  const line = (await lines(Math.floor(game / state.data.chunk)))[game % state.data.chunk];
  const [own, reads] = line.split("\t");
  return { ...JSON.parse(own), reads: JSON.parse(reads) };
}

// ---- elements ------------------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, given] of Object.entries(attributes)) {
    if (name === "outcome") made.style.setProperty("--outcome", `var(--${given})`);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), given);
    else if (given !== null && given !== undefined) made.setAttribute(name, given);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, given] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, given); // not as an attribute: the page's policy forbids it
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), given);
    else made.setAttribute(name, given);
  }
  made.append(...children);
  return made;
}

const words = (name) => String(name).replaceAll("_", " ");
const number = (x, digits = 2) => (x === null || x === undefined ? "" : x.toFixed(digits));
const folded = (label, ...children) => element("details", {}, element("summary", {}, label), ...children);
const text = (content, kind) => element("pre", kind ? { class: kind } : {}, content ?? "");

// ---- filters -------------------------------------------------------------------------------------------------------

function makeFilters() {
  const form = byId("filters");
  for (const name of FILTERED) {
    const c = column(name);
    if (!c || c.words.length < 2) continue;
    const select = element("select", { "data-filter": name, "aria-label": words(name) }, new Option(`any ${words(name)}`, ""));
    c.words.forEach((word, code) => select.append(new Option(`${words(name)}: ${word === null ? "none" : words(word)}`, code)));
    select.addEventListener("change", () => want(name, select.value === "" ? null : Number(select.value)));
    form.insertBefore(select, byId("clear"));
  }
  for (const id of ["first", "last"]) byId(id).addEventListener("input", filter);
  let waiting;
  byId("text").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 250); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => { state.wanted.clear(); setTimeout(filter); });
}

function want(name, code) {
  if (code === null) state.wanted.delete(name);
  else state.wanted.set(name, code);
  const select = document.querySelector(`[data-filter="${name}"]`);
  if (select) select.value = code === null ? "" : code;
  return filter();
}

function wantStep(step) {
  const only = byId("first").value === String(step) && byId("last").value === String(step);
  byId("first").value = byId("last").value = only ? "" : step;
  return filter();
}

let filtering = 0;
async function filter() {
  const turn = ++filtering;
  const first = byId("first").value === "" ? -Infinity : Number(byId("first").value);
  const last = byId("last").value === "" ? Infinity : Number(byId("last").value);
  const wanted = [...state.wanted].map(([name, code]) => [column(name).codes, code]);
  const steps = column("step").values;
  let games = [];
  for (let game = 0; game < state.data.games; game++) {
    if (steps[game] < first || steps[game] > last) continue;
    if (wanted.every(([codes, code]) => codes[game] === code)) games.push(game);
  }
  const phrase = byId("text").value.trim().toLowerCase();
  if (phrase) {
    games = await withText(games, phrase, turn);
    if (turn !== filtering) return; // another filter has begun
  }
  state.shown = games;
  const { games: all, played } = state.data;
  byId("count").textContent = `${games.length} of ${all} games` + (played > all ? ` (a sample of ${played})` : "");
  byId("rows").style.height = games.length * ROW_HEIGHT + "px";
  drawList();
  drawPlots();
}

async function withText(games, phrase, turn) {
  const { chunk: size, games: all } = state.data;
  const left = new Set(games);
  const hits = [];
  const sought = JSON.stringify(phrase).slice(1, -1); // as it stands in the record's JSON
  for (let chunk = 0; chunk * size < all && turn === filtering; chunk++) {
    byId("count").textContent = `searching, ${Math.round((100 * chunk * size) / all)} %`;
    const rows = recent.get(chunk) ?? (await unpack("chunk" + chunk)).split("\n");
    rows.forEach((row, place) => {
      const game = chunk * size + place;
      if (left.has(game) && row.slice(0, row.indexOf("\t")).toLowerCase().includes(sought)) hits.push(game);
    });
  }
  return hits;
}

// ---- list ----------------------------------------------------------------------------------------------------------

function drawList() {
  const list = byId("list");
  const from = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 10);
  const to = Math.min(state.shown.length, from + Math.ceil(list.clientHeight / ROW_HEIGHT) + 20);
  const rows = [];
  for (let place = from; place < to; place++) {
    const game = state.shown[place];
    const outcome = value("outcome", game);
    const row = element(
      "div",
      { class: "row" + (game === state.chosen ? " chosen" : ""), "data-game": game, outcome },
      element("span", {}, value("step", game)),
      element("span", {}, words(value("category", game))),
      element("span", { class: "sign" }, SIGNS[outcome]),
      element("span", {}, words(value("invalid", game) ?? outcome)),
      element("span", { title: "the attacker's reward" }, number(value("attacker_reward", game))),
      element("span", { title: "the assessor's reward" }, number(value("assessor_reward", game))),
    );
    row.style.top = place * ROW_HEIGHT + "px";
    rows.push(row);
  }
  byId("rows").replaceChildren(...rows);
}

function scrollTo(place) {
  const list = byId("list");
  const top = place * ROW_HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
}

// ---- one game ------------------------------------------------------------------------------------------------------

function changes(before, after) {
  const old = before.split(/(\s+)/);
  const now = after.split(/(\s+)/);
  let start = 0;
  while (start < old.length && start < now.length && old[start] === now[start]) start++;
  let end = 0;
  while (end < old.length - start && end < now.length - start && old.at(-1 - end) === now.at(-1 - end)) end++;
  const a = old.slice(start, old.length - end);
  const b = now.slice(start, now.length - end);
  // Longest common subsequence of what is left, by dynamic programming: common[i][j] is that of a[i:] and b[j:].
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
  const out = [old.slice(0, start).join("")];
  for (let i = 0, j = 0; i < a.length || j < b.length; ) {
    if (i < a.length && j < b.length && a[i] === b[j]) { out.push(a[i]); i++; j++; }
    else if (i < a.length && (j >= b.length || common[i + 1][j] >= common[i][j + 1])) out.push(element("del", {}, a[i++]));
    else out.push(element("ins", {}, b[j++]));
  }
  out.push(old.slice(old.length - end).join(""));
  return element("pre", {}, ...out);
}

function withQuote(note, quote, label) {
  // The assessor may quote with other white space.
  const pattern = (quote ?? "").trim().split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("\\s+");
  const match = pattern && note.match(new RegExp(pattern));
  if (!match) return element("pre", {}, note);
  const end = match.index + match[0].length;
  return element("pre", {}, note.slice(0, match.index), element("mark", { title: label }, match[0]), note.slice(end));
}

function facts(pairs) {
  const list = element("dl");
  for (const [name, content] of pairs)
    if (content !== null && content !== undefined && content !== "")
      list.append(element("dt", {}, name), element("dd", {}, String(content)));
  return list;
}

function turn(kind, title, ...children) {
  return element("section", { class: "turn " + kind }, element("h3", {}, title), ...children);
}

function reads(messages, who) {
  if (!messages) return null;
  return folded(`what the ${who} read`, ...messages.flatMap((m) => [element("h3", {}, m.role), text(m.content, "raw")]));
}

function attackPart(game) {
  const { attack, spec } = game;
  if (!attack) return turn("attacker", "no attack: the note is shown as it is in the data", text(spec.seed_note));
  const standing = attack.invalid ? `invalid: ${words(attack.invalid)}` : "valid";
  return turn(
    "attacker",
    `attacker · ${standing} · ${attack.tokens} tokens${attack.truncated ? ", cut off" : ""}`,
    folded("reasoning (never shown to the assessor)", text(attack.reasoning || "none")),
    attack.note === null ? text(attack.response, "raw") : changes(spec.seed_note, attack.note),
    facts([["words changed", attack.changed_words], ["format", attack.violations.join(", ")], ["injections", attack.injections.join(", ")]]),
    reads(game.reads.attacker, "attacker"),
    attack.note === null ? null : folded("answer as written", text(attack.response, "raw")),
  );
}

function assessmentPart(game) {
  const { assessment } = game;
  if (!assessment) return null;
  return turn(
    "assessor",
    `assessor · says ${assessment.verdict ?? "nothing readable"} · ${assessment.tokens} tokens${assessment.truncated ? ", cut off" : ""}`,
    folded("reasoning", text(assessment.reasoning || "none")),
    withQuote(game.presented_note ?? "", assessment.sentence, "the assessor's sentence"),
    facts([
      ["wrong sentence", assessment.sentence], ["type", assessment.error_type], ["correction", assessment.correction],
      ["format", assessment.violations.join(", ")],
    ]),
    reads(game.reads.assessor, "assessor"),
    folded("answer as written", text(assessment.response, "raw")),
    ...(game.further_assessments ?? []).map((other) =>
      folded(`another assessment says ${other.verdict ?? "nothing readable"}`, text(other.response, "raw"))),
  );
}

function judgePart(game) {
  const { judgement } = game;
  if (!judgement) return null;
  return turn(
    "judge",
    `judge ${judgement.judge} · ${judgement.label ?? "abstains"}`,
    facts([
      ["asked for", game.spec.target_label], ["wrong in this note", game.error_sentences.join(" | ")], ["reason", judgement.reason],
      ["realistic", judgement.realistic],
      ["found in the note alone", (judgement.readings ?? []).map((r) => (r.failed ? "lost" : r.found === null ? "cannot tell" : r.found ? "yes" : "no")).join(", ")],
    ]),
  );
}

function rewardTable(rewards) {
  const rows = Object.entries(rewards).map(([role, parts]) => {
    const sum = Object.values(parts).reduce((a, b) => a + b, 0);
    const cells = Object.entries(parts).map(([name, x]) => element("td", {}, `${words(name)} ${number(x)}`));
    return element("tr", {}, element("th", {}, `${role} ${number(sum)}`), ...cells);
  });
  return element("table", { class: "rewards" }, ...rows);
}

function related(title, games, label) {
  if (games.length < 2) return null;
  const links = games.slice(0, 60).map((game) =>
    element("a", { href: "#" + game, "aria-current": game === state.chosen ? "true" : null, outcome: value("outcome", game) },
      element("span", { class: "sign" }, SIGNS[value("outcome", game)]), " " + label(game)));
  const more = games.length > links.length ? ` and ${games.length - links.length} more` : "";
  return element("p", { class: "links" }, `${title}: `, ...links, more);
}

function gamesWith(names, game) {
  const games = [];
  for (let other = 0; other < state.data.games; other++)
    if (names.every((name) => value(name, other) === value(name, game))) games.push(other);
  return games;
}

async function open(game) {
  if (!(game >= 0 && game < state.data.games)) return;
  state.chosen = game;
  if (location.hash !== "#" + game) history.replaceState(null, "", "#" + game);
  const shown = await record(game);
  if (state.chosen !== game) return; // another one was opened meanwhile
  const outcome = value("outcome", game);
  const group = gamesWith(["run", "step", "uid"], game);
  const same = gamesWith(["run", "vignette_id"], game);
  byId("game").replaceChildren(
    element("h2", { outcome }, `${SIGNS[outcome]} ${words(outcome)}`),
    element("p", {}, [
      `step ${shown.step}`, words(shown.spec.category), shown.spec.error_type, `case ${shown.spec.vignette_id}`,
      shown.void && `void: ${shown.void}`, column("run").words.length > 1 && value("run", game),
    ].filter(Boolean).join(" · ")),
    related("group", group, (other) => `game ${value("session", other)}`) ?? "",
    related("same case", same, (other) => `step ${value("step", other)}`) ?? "",
    rewardTable(shown.rewards),
    ...[attackPart(shown), assessmentPart(shown), judgePart(shown)].filter(Boolean),
    folded("record", text(JSON.stringify({ ...shown, reads: undefined }, null, 1), "raw")),
  );
  byId("game").scrollTop = 0;
  const place = state.shown.indexOf(game);
  if (place >= 0) scrollTo(place);
  drawList();
}

// ---- plots ---------------------------------------------------------------------------------------------------------

const PLOT = { width: 300, height: 128, left: 36, right: 8, top: 6, bottom: 18 };

function scale(low, high, from, to) {
  return (x) => from + ((x - low) / (high - low || 1)) * (to - from);
}

function frame(steps, low, high, digits = 2) {
  const { width, height, left, right, top, bottom } = PLOT;
  const x = scale(steps[0], steps.at(-1), left, width - right);
  const y = scale(low, high, height - bottom, top);
  const svg = drawn("svg", { width, height, role: "img" });
  for (const tick of low < 0 && high > 0 ? [low, 0, high] : [low, high])
    svg.append(
      drawn("line", { class: "axis", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      drawn("text", { x: left - 4, y: y(tick) + 3, "text-anchor": "end" }, tick.toFixed(digits)),
    );
  svg.append(drawn("text", { x: left, y: height - 4 }, `step ${steps[0]}`));
  svg.append(drawn("text", { x: width - right, y: height - 4, "text-anchor": "end" }, String(steps.at(-1))));
  return { svg, x, y };
}

function stepMarks({ svg, x }, steps, runs) {
  const { height, bottom, top, width, left, right } = PLOT;
  for (const run of runs) {
    for (const [step, alarms] of Object.entries(state.data.alarms[run] ?? {}))
      if (step >= steps[0] && step <= steps.at(-1))
        svg.append(drawn("line", { class: "mark", x1: x(step), x2: x(step), y1: 0, y2: top + 4 }, drawn("title", {}, `alarm: ${alarms.join(", ")}`)));
    for (const step of state.data.checkpoints[run] ?? [])
      if (step >= steps[0] && step <= steps.at(-1))
        svg.append(drawn("line", { class: "checkpoint", x1: x(step), x2: x(step), y1: height - bottom, y2: height - bottom + 4 }, drawn("title", {}, `checkpoint ${step}`)));
  }
  const wide = Math.max(2, (width - left - right) / steps.length);
  for (const step of steps)
    svg.append(drawn("rect", { class: "step", x: x(step) - wide / 2, y: top, width: wide, height: height - top - bottom, onclick: () => wantStep(step) },
      drawn("title", {}, `step ${step}: click for its games alone`)));
}

function means(name, games) {
  const sums = new Map();
  for (const game of games) {
    const x = Number(value(name, game) ?? NaN);
    if (Number.isNaN(x)) continue;
    const step = value("step", game);
    const [sum, count] = sums.get(step) ?? [0, 0];
    sums.set(step, [sum + x, count + 1]);
  }
  return new Map([...sums].map(([step, [sum, count]]) => [step, sum / count]));
}

function lineChart(series, runs) {
  series = series.filter(({ points }) => points.size);
  const steps = [...new Set(series.flatMap(({ points }) => [...points.keys()]))].sort((a, b) => a - b);
  if (!steps.length) return [element("p", {}, "nothing to draw")];
  const all = series.flatMap(({ points }) => [...points.values()]);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const large = Math.max(Math.abs(low), Math.abs(high));
  const plot = frame(steps, low === high ? low - 0.5 : low, low === high ? high + 0.5 : high, large >= 100 ? 0 : large < 0.1 ? 4 : 2);
  for (const { points, color, dash, name } of series) {
    const path = steps.filter((step) => points.has(step)).map((step) => `${plot.x(step).toFixed(1)} ${plot.y(points.get(step)).toFixed(1)}`);
    plot.svg.append(drawn("path", { d: "M" + path.join("L"), fill: "none", "stroke-width": 1.7, "stroke-dasharray": dash, style: { stroke: color } }, drawn("title", {}, name)));
    if (path.length === 1) plot.svg.append(drawn("circle", { cx: plot.x(steps[0]), cy: plot.y(points.values().next().value), r: 2.5, style: { fill: color } }));
  }
  stepMarks(plot, steps, runs);
  return [plot.svg, legend(series.map(({ name, color, dash }) => [name, color, dash]))];
}

function legend(entries) {
  return element("div", { class: "legend" }, ...entries.map(([name, color, dash]) => {
    const line = dash === undefined ? [] : [drawn("line", { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 2, "stroke-dasharray": dash, style: { stroke: color } })];
    const swatch = element("span", { class: "swatch" }, line.length ? drawn("svg", { width: 22, height: 10 }, ...line) : null);
    if (line.length) swatch.classList.add("line");
    else swatch.style.background = color;
    return element("span", {}, swatch, name);
  }));
}

function shareChart(games) {
  const outcomes = column("outcome");
  const order = outcomes.words.map((_, code) => code).sort((a, b) => Object.keys(SIGNS).indexOf(outcomes.words[a]) - Object.keys(SIGNS).indexOf(outcomes.words[b]));
  const counts = new Map();
  for (const game of games) {
    const step = value("step", game);
    if (!counts.has(step)) counts.set(step, new Float64Array(outcomes.words.length));
    counts.get(step)[outcomes.codes[game]]++;
  }
  const steps = [...counts.keys()].sort((a, b) => a - b);
  if (!steps.length) return [element("p", {}, "nothing to draw")];
  const plot = frame(steps, 0, 1, 0);
  // A single step is drawn as a bar, from edge to edge.
  const places = steps.length > 1 ? steps.map(plot.x) : [PLOT.left, PLOT.width - PLOT.right];
  const rows = steps.length > 1 ? steps : [steps[0], steps[0]];
  let below = rows.map(() => 0);
  for (const code of order) {
    const above = rows.map((step, k) => below[k] + counts.get(step)[code] / counts.get(step).reduce((a, b) => a + b));
    const edge = (heights) => heights.map((h, k) => `${places[k].toFixed(1)} ${plot.y(h).toFixed(1)}`);
    const name = outcomes.words[code];
    plot.svg.append(drawn("path", { d: "M" + [...edge(above), ...edge(below).reverse()].join("L") + "Z", style: { fill: `var(--${name})` } }, drawn("title", {}, words(name))));
    below = above;
  }
  stepMarks(plot, steps, [...new Set(games.map((game) => value("run", game)))]);
  return [plot.svg, legend(order.map((code) => [`${SIGNS[outcomes.words[code]]} ${words(outcomes.words[code])}`, `var(--${outcomes.words[code]})`]))];
}

function scatter(across, up, games) {
  const points = games.map((game) => [value(across, game), value(up, game), game]).filter(([a, b]) => a !== null && b !== null);
  if (!points.length) return [element("p", {}, "nothing to draw")];
  // No spreading into Math.min: a run has more games than a call may have arguments.
  const [low, high] = points.reduce(([l, h], [, b]) => [Math.min(l, b), Math.max(h, b)], [Infinity, -Infinity]);
  const most = points.reduce((m, [a]) => Math.max(m, a), 1);
  const { width, height, left, right, bottom } = PLOT;
  const x = scale(0, most, left, width - right);
  const { svg, y } = frame([0, most], low, high === low ? low + 1 : high);
  svg.lastChild.remove(); // the frame's own labels are for steps
  svg.lastChild.remove();
  svg.append(drawn("text", { x: left, y: height - 4 }, `${words(across)}, 0 to ${most}`));
  const every = Math.ceil(points.length / 1500); // more dots than this hide each other
  points.forEach(([a, b, game], k) => {
    if (k % every) return;
    const color = `var(--${value("outcome", game)})`;
    svg.append(drawn("circle", { cx: x(a), cy: y(b), r: 2.2, "fill-opacity": 0.6, style: { fill: color, cursor: "pointer" }, onclick: () => open(game) }));
  });
  return [svg, legend([[`dots are games, up: ${words(up)}`, "var(--soft)"]])];
}

function crossTable(down, across, games) {
  const rows = column(down);
  const columns = column(across);
  const counts = rows.words.map(() => new Uint32Array(columns.words.length));
  for (const game of games) counts[rows.codes[game]][columns.codes[game]]++;
  const title = (word) => (word === null ? "none" : words(word));
  const head = columns.words.map((word) => element("th", {}, across === "outcome" ? `${SIGNS[word]} ${title(word)}` : title(word)));
  const body = rows.words.map((word, r) => element("tr", {}, element("th", {}, title(word)), ...columns.words.map((_, c) => {
    const pressed = state.wanted.get(down) === r && state.wanted.get(across) === c;
    const cell = element("button", { type: "button", "aria-pressed": pressed, onclick: () => {
      want(down, pressed ? null : r);
      want(across, pressed ? null : c);
    } }, String(counts[r][c] || ""));
    return element("td", {}, cell);
  })));
  return element("table", { class: "cross" }, element("thead", {}, element("tr", {}, element("th"), ...head)), element("tbody", {}, ...body));
}

function chooser(key, options) {
  const select = element("select", { "aria-label": "what to draw" }, ...options.map(([label, id]) => new Option(label, id, false, String(state.plots[key]) === String(id))));
  select.addEventListener("change", () => { state.plots[key] = select.value; drawPlots(); });
  return select;
}

function figure(caption, children) {
  return element("figure", {}, element("figcaption", {}, caption), ...children);
}

function drawPlots() {
  const { rewards, metrics } = state.data;
  const runs = column("run").words;
  const byRun = runs.map((_, code) => state.shown.filter((game) => column("run").codes[game] === code));
  const perRun = (make) => runs.flatMap((run, code) => (byRun[code].length ? make(run, byRun[code], DASHES[code % DASHES.length]) : []));
  const named = (name, run) => (runs.length > 1 ? `${name}, ${run}` : name);

  const shares = perRun((run, games) => [figure(named("outcomes by step", run), shareChart(games))]);

  const parts = state.plots.reward === "roles" ? ["attacker_reward", "assessor_reward"] : [state.plots.reward];
  const rewardLines = perRun((run, games, dash) => parts.map((name) => ({
    name: named(words(name.replace("reward/", "")), run), points: means(name, games), dash,
    color: name.includes("attacker") ? "var(--attacker)" : "var(--assessor)",
  })));
  const rewardChooser = chooser("reward", [["rewards of the roles", "roles"], ...rewards.map((name) => [words(name), name])]);

  const metricNames = [...new Set(Object.values(metrics).flatMap(({ names }) => Object.keys(names)))].sort();
  const numberChooser = chooser("number", [
    ...BY_STEP.map((name) => [`mean: ${words(name)}`, "mean:" + name]),
    ...SCATTERED.map(([a, b], k) => [`${words(a)} against ${words(b)}`, "scatter:" + k]),
    ...metricNames.map((name) => [name, "metric:" + name]),
  ]);
  const separator = state.plots.number.indexOf(":");
  const [kind, which] = [state.plots.number.slice(0, separator), state.plots.number.slice(separator + 1)];
  let numbers;
  if (kind === "scatter") numbers = scatter(...SCATTERED[which], state.shown);
  else {
    const points = kind === "mean"
      ? perRun((run, games, dash) => [{ name: named(words(which), run), points: means(which, games), dash, color: PALETTE[runs.indexOf(run) % PALETTE.length] }])
      : runs.map((run, k) => {
        const values = metrics[run].names[which] ?? [];
        return { name: named(which, run), points: new Map(metrics[run].steps.map((step, i) => [step, values[i]]).filter(([, x]) => typeof x === "number")), dash: DASHES[k % DASHES.length], color: PALETTE[k % PALETTE.length] };
      });
    numbers = lineChart(points, runs);
  }

  const [down, across] = CROSSED[state.plots.cross];
  const crossChooser = chooser("cross", CROSSED.map(([a, b], k) => [`${words(a)} by ${words(b)}`, k]));

  byId("plots").replaceChildren(
    ...shares,
    figure(rewardChooser, lineChart(rewardLines, runs)),
    figure(numberChooser, numbers),
    figure(crossChooser, [crossTable(down, across, state.shown)]),
  );
}

// ---- keys and start ------------------------------------------------------------------------------------------------

function move(by) {
  const place = state.shown.indexOf(state.chosen);
  const next = place < 0 ? 0 : Math.min(state.shown.length - 1, Math.max(0, place + by));
  if (state.shown.length) open(state.shown[next]);
}

function moveStep(by) {
  if (state.chosen < 0) return move(1);
  const step = value("step", state.chosen);
  const others = state.shown.filter((game) => (value("step", game) - step) * by > 0);
  if (!others.length) return;
  const nearest = value("step", by > 0 ? others[0] : others.at(-1));
  open(others.find((game) => value("step", game) === nearest));
}

function moveWithin(names) {
  if (state.chosen < 0) return;
  const games = gamesWith(names, state.chosen);
  open(games[(games.indexOf(state.chosen) + 1) % games.length]);
}

const KEYS = {
  j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1),
  n: () => moveStep(1), p: () => moveStep(-1),
  g: () => moveWithin(["run", "step", "uid"]), c: () => moveWithin(["run", "vignette_id"]),
  "/": () => byId("text").focus(), Escape: () => byId("filters").reset(),
};

function onKey(event) {
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
  if (event.key.startsWith("Arrow") && event.target.id !== "list" && event.target !== document.body) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  if (typing) event.target.blur();
  act();
}

async function start() {
  state.data = JSON.parse(await unpack("columns"));
  byId("title").textContent = column("run").words.join(", ");
  document.title = `Games: ${byId("title").textContent}`;
  makeFilters();
  byId("list").addEventListener("scroll", () => requestAnimationFrame(drawList));
  byId("rows").addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) open(Number(row.dataset.game));
  });
  addEventListener("hashchange", () => open(Number(location.hash.slice(1))));
  addEventListener("keydown", onKey);
  addEventListener("resize", drawList);
  await filter();
  await open(location.hash ? Number(location.hash.slice(1)) : state.data.first);
  document.body.dataset.ready = Math.round(performance.now());
}

start().catch((error) => { byId("game").replaceChildren(element("p", {}, `This page cannot be drawn: ${error}`)); });
