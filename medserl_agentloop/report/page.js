"use strict";
// The page of `medserl report`. All text of models and data becomes text nodes: nothing here makes markup of a string.

const ROW_HEIGHT = 24;
const MOST_CHARACTERS = 20000; // of one text: a browser takes minutes to break a word of a million letters into lines
// Outcomes of the medical game in the order in which they are stacked. page.css has their colours; other games' take turns.
const SIGNS = {
  correct_detection: "✓", correct_rejection: "✓", missed_error: "✗", false_positive: "✗",
  invalid_attack: "!", unreadable_assessment: "?", void: "∅",
};
const DASHES = ["", "6 3", "2 2", "8 3 2 3", "1 3"];
const PALETTE = ["var(--first)", "var(--second)", "var(--third)", "var(--fourth)", "var(--fifth)", "var(--sixth)"];

const byId = (id) => document.getElementById(id);
const state = { data: null, shown: [], chosen: -1, wanted: new Map(), plots: { curve: "roles", down: "", across: "outcome" } };

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
const measured = (name, game) => {
  const found = value(name, game);
  return found === "yes" ? 1 : found === "no" ? 0 : found;
};
const gamesThat = (fit) => [...Array(state.data.games).keys()].filter(fit);
const gamesWith = (names, game) => gamesThat((other) => names.every((name) => value(name, other) === value(name, game)));
const sign = (outcome) => SIGNS[outcome] ?? "";
const outcomeColor = (outcome) => (outcome in SIGNS ? `var(--${outcome})` : PALETTE[column("outcome").words.indexOf(outcome) % PALETTE.length]);
const roles = () => state.data.rewards.map((name) => name.replace(/_reward$/, ""));
const roleColor = (role) => PALETTE[roles().indexOf(role) % PALETTE.length] ?? "var(--other)";

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
  const [own, sections] = line.split("\t").map((text) => JSON.parse(text));
  return { own, sections };
}

// ---- elements ------------------------------------------------------------------------------------------------------

function filled(made, attributes, children) {
  for (const [name, given] of Object.entries(attributes)) {
    if (name === "color") made.style.setProperty("--color", given);
    else if (name === "style") Object.assign(made.style, given); // not as an attribute: the page's policy forbids it
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), given);
    else if (given !== null && given !== undefined) made.setAttribute(name, given);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const element = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
const drawn = (tag, attributes, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const words = (name) => String(name).replaceAll("_", " ").replace("missed error", "undetected error"); // as outcome_words
const number = (x, digits = 2) => (x === null || x === undefined ? "" : x.toFixed(digits));
const fold = (label, ...children) => element("details", {}, element("summary", {}, label), ...children);

function pieces(marked, kind) {
  let left = MOST_CHARACTERS;
  const shown = [];
  for (const [mark, words] of marked) {
    const some = words.slice(0, left);
    if (some) shown.push(mark ? element(mark, {}, some) : some);
    left -= some.length;
  }
  const more = marked.reduce((sum, [, words]) => sum + words.length, left - MOST_CHARACTERS);
  return element("pre", kind ? { class: kind } : {}, ...shown, more ? element("em", {}, ` … ${more} more characters stand in the games file`) : "");
}

const text = (content, kind) => pieces([["", content ?? ""]], kind);

// ---- filters -------------------------------------------------------------------------------------------------------

function makeFilters() {
  const form = byId("filters");
  for (const name of state.data.filters) {
    const c = column(name);
    if (c.words.length < 2) continue;
    const select = element("select", { "data-filter": name, "aria-label": words(name), title: state.data.meanings[name] }, new Option(`any ${words(name)}`, ""));
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
  let games = gamesThat((game) => !(steps[game] < first || steps[game] > last) && wanted.every(([codes, code]) => codes[game] === code));
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

const ofList = () => ["step", ...(column("category") ? ["category"] : []), "outcome", ...state.data.rewards];

function drawHead() {
  const wide = { step: "42px", category: "136px", outcome: "minmax(166px, 1fr)" };
  byId("list").style.setProperty("--columns", ofList().map((name) => wide[name] ?? "56px").join(" "));
  byId("head").replaceChildren(...ofList().map((name) => element("span", {}, words(name))));
}

function drawList() {
  const list = byId("list");
  const from = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 10);
  const to = Math.min(state.shown.length, from + Math.ceil(list.clientHeight / ROW_HEIGHT) + 20);
  const rows = [];
  for (let place = from; place < to; place++) {
    const game = state.shown[place];
    const outcome = value("outcome", game);
    const why = column("invalid") ? value("invalid", game) : null;
    const cells = ofList().map((name) => {
      if (name === "outcome") return element("span", { title: words(why ?? outcome) }, element("b", {}, sign(outcome)), " " + words(why ?? outcome));
      const found = value(name, game);
      return element("span", {}, state.data.rewards.includes(name) ? number(found) : words(found));
    });
    const row = element("div", { class: "row" + (game === state.chosen ? " chosen" : ""), "data-game": game, color: outcomeColor(outcome) }, ...cells);
    row.style.top = place * ROW_HEIGHT + "px";
    rows.push(row);
  }
  byId("rows").replaceChildren(...rows);
}

function scrollTo(place) {
  const list = byId("list");
  const top = place * ROW_HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  const below = top + ROW_HEIGHT + byId("head").offsetHeight - list.clientHeight;
  if (below > list.scrollTop) list.scrollTop = below;
}

// ---- one game ------------------------------------------------------------------------------------------------------

function sectionPart({ title, owner, reasoning, text: marked, facts, folded }) {
  const known = Object.entries(facts).flatMap(([name, content]) => [element("dt", {}, words(name)), element("dd", {}, text(content))]);
  return element(
    "section",
    { class: "turn", color: roleColor(owner) },
    element("h3", {}, words(title)),
    reasoning === null ? "" : fold("reasoning", text(reasoning)),
    marked.length ? pieces(marked) : "",
    known.length ? element("dl", {}, ...known) : "",
    ...Object.entries(folded).filter(([, content]) => content).map(([label, content]) => fold(label, text(content, "raw"))),
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
    element("a", { href: "#" + game, "aria-current": game === state.chosen ? "true" : null, color: outcomeColor(value("outcome", game)) },
      element("b", {}, sign(value("outcome", game))), " " + label(game)));
  const more = games.length > links.length ? ` and ${games.length - links.length} more` : "";
  return element("p", { class: "links" }, `${title}:`, ...links, more);
}

async function open(game) {
  if (!(game >= 0 && game < state.data.games)) return;
  state.chosen = game;
  if (location.hash !== "#" + game) history.replaceState(null, "", "#" + game);
  const shown = await record(game);
  if (state.chosen !== game) return; // another one was opened meanwhile
  const outcome = value("outcome", game);
  const group = gamesWith(["run", "step", "uid"], game);
  const same = column("vignette_id") ? gamesWith(["run", "vignette_id"], game) : [];
  const known = ["category", "error_type", "vignette_id", "void", ...(column("run").words.length > 1 ? ["run"] : [])];
  byId("game").replaceChildren(
    element("h2", { color: outcomeColor(outcome) }, `${sign(outcome)} ${words(outcome)}`),
    element("p", {}, [`step ${value("step", game)}`, ...known.filter(column).map((name) => value(name, game)).filter(Boolean).map(words)].join(" · ")),
    related("group", group, (other) => `game ${value("session", other)}`) ?? "",
    related("same case", same, (other) => `step ${value("step", other)}`) ?? "",
    rewardTable(shown.own.rewards),
    ...shown.sections.map(sectionPart),
    fold("record", text(JSON.stringify(shown.own, null, 1), "raw")),
  );
  byId("game").scrollTop = 0;
  const place = state.shown.indexOf(game);
  if (place >= 0) scrollTo(place);
  drawList();
}

// ---- plots ---------------------------------------------------------------------------------------------------------

const PLOT = { get width() { return innerWidth < 1250 ? 235 : 300; }, height: 128, left: 40, right: 8, top: 6, bottom: 18 };

function scale(low, high, from, to) {
  return (x) => from + ((x - low) / (high - low || 1)) * (to - from);
}

function frame(steps, low, high, digits = 2, ends = [`step ${steps[0]}`, steps.at(-1)]) {
  const { width, height, left, right, top, bottom } = PLOT;
  const x = scale(steps[0], steps.at(-1), left, width - right);
  const y = scale(low, high, height - bottom, top);
  const svg = drawn("svg", { width, height, role: "img" });
  for (const tick of low < 0 && high > 0 ? [low, 0, high] : [low, high])
    svg.append(
      drawn("line", { class: "axis", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      drawn("text", { x: left - 4, y: y(tick) + 3, "text-anchor": "end" }, tick.toFixed(digits)),
    );
  svg.append(drawn("text", { x: left, y: height - 4 }, ends[0]), drawn("text", { x: width - right, y: height - 4, "text-anchor": "end" }, ends[1]));
  return { svg, x, y };
}

function stepMarks({ svg, x }, steps, runs) {
  const { height, bottom, top, width, left, right } = PLOT;
  const inside = (step) => step >= steps[0] && step <= steps.at(-1);
  const entries = new Map();
  const mark = (kind, step, y, title) => {
    svg.append(drawn("line", { class: kind, x1: x(step), x2: x(step), y1: y, y2: y + (kind === "alarm" ? top + 4 : 4) }, drawn("title", {}, title)));
    entries.set(kind, [kind === "alarm" ? "alarm: point at it for its name" : kind, `var(--${kind})`]);
  };
  for (const run of runs) {
    const { alarms: byStep, checkpoints } = state.data.metrics[run];
    for (const [step, alarms] of Object.entries(byStep)) if (alarms.length && inside(step)) mark("alarm", step, 0, `alarm: ${alarms.join(", ")}`);
    for (const step of checkpoints) if (inside(step)) mark("checkpoint", step, height - bottom, `checkpoint ${step}`);
  }
  const wide = Math.max(2, (width - left - right) / steps.length);
  for (const step of steps)
    svg.append(drawn("rect", { class: "step", x: x(step) - wide / 2, y: top, width: wide, height: height - top - bottom, onclick: () => wantStep(step) },
      drawn("title", {}, `step ${step}: click for its games alone`)));
  return [...entries.values()];
}

function means(name, games) {
  const sums = new Map();
  for (const game of games) {
    const x = Number(measured(name, game) ?? NaN);
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
  const plot = frame(steps, low === high ? low - 0.5 : low, low === high ? high + 0.5 : high, large >= 100 ? 0 : low < high && large < 0.1 ? 4 : 2);
  for (const { points, color, dash, name } of series) {
    const path = steps.filter((step) => points.has(step)).map((step) => `${plot.x(step).toFixed(1)} ${plot.y(points.get(step)).toFixed(1)}`);
    plot.svg.append(drawn("path", { d: "M" + path.join("L"), fill: "none", "stroke-width": 1.7, "stroke-dasharray": dash, style: { stroke: color } }, drawn("title", {}, name)));
    if (path.length === 1) plot.svg.append(drawn("circle", { cx: plot.x(steps[0]), cy: plot.y(points.values().next().value), r: 2.5, style: { fill: color } }));
  }
  const marks = stepMarks(plot, steps, runs);
  return [plot.svg, legend([...series.map(({ name, color, dash }) => [name, color, dash]), ...marks])];
}

function legend(entries) {
  return element("div", { class: "legend" }, ...entries.map(([name, color, dash]) => {
    const line = { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 2, "stroke-dasharray": dash, style: { stroke: color } };
    const swatch = dash === undefined ? drawn("rect", { width: 9, height: 9, style: { fill: color } }) : drawn("line", line);
    return element("span", {}, drawn("svg", { class: "swatch", width: dash === undefined ? 9 : 22, height: 10 }, swatch), name);
  }));
}

function shareChart(games) {
  const outcomes = column("outcome");
  const rank = (code) => Object.keys(SIGNS).indexOf(outcomes.words[code]);
  const order = outcomes.words.map((_, code) => code).sort((a, b) => rank(a) - rank(b));
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
    plot.svg.append(drawn("path", { d: "M" + [...edge(above), ...edge(below).reverse()].join("L") + "Z", style: { fill: outcomeColor(name) } }, drawn("title", {}, words(name))));
    below = above;
  }
  const marks = stepMarks(plot, steps, [...new Set(games.map((game) => value("run", game)))]);
  const named = order.map((code) => outcomes.words[code]).map((name) => [`${sign(name)} ${words(name)}`, outcomeColor(name)]);
  return [plot.svg, legend([...named, ...marks])];
}

function scatter(across, up, games) {
  const points = games.map((game) => [value(across, game), value(up, game), game]).filter(([a, b]) => a !== null && b !== null);
  if (!points.length) return [element("p", {}, "nothing to draw")];
  // No spreading into Math.min: a run has more games than a call may have arguments.
  const [low, high] = points.reduce(([l, h], [, b]) => [Math.min(l, b), Math.max(h, b)], [Infinity, -Infinity]);
  const most = points.reduce((m, [a]) => Math.max(m, a), 1);
  const { svg, x, y } = frame([0, most], low, high === low ? low + 1 : high, 2, [`${words(across)}, 0 to ${most}`, ""]);
  const every = Math.ceil(points.length / 1500); // more dots than this hide each other
  points.forEach(([a, b, game], k) => {
    if (k % every) return;
    const color = outcomeColor(value("outcome", game));
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
  const head = columns.words.map((word) => element("th", {}, across === "outcome" ? `${sign(word)} ${title(word)}` : title(word)));
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

function chooser(key, label, options) {
  const select = element("select", { "aria-label": label }, ...options.map(([name, id]) => new Option(name, id, false, state.plots[key] === id)));
  select.addEventListener("change", () => { state.plots[key] = select.value; drawPlots(); });
  return select;
}

function figure(caption, children) {
  return element("figure", {}, element("figcaption", {}, ...caption), ...children);
}

const metricNames = () => [...new Set(Object.values(state.data.metrics).flatMap(({ names }) => Object.keys(names)))].sort();

// What can be drawn by step, by its id, which has a kind before the colon: its label.
function curves() {
  const { rewards, components, shares, numbers } = state.data;
  return [
    ["rewards of the roles", "roles"],
    ...components.map((name) => [words(name), "mean:" + name]),
    ...shares.map((name) => [`share: ${words(name)}`, "mean:" + name]),
    ...numbers.map((name) => [`mean: ${words(name)}`, "mean:" + name]),
    ...numbers.flatMap((name) => rewards.map((reward) => [`${words(name)} against ${words(reward)}`, `dots:${name}:${reward}`])),
    ...metricNames().map((name) => [name, "metric:" + name]),
  ];
}

function drawPlots() {
  const { rewards, metrics, filters } = state.data;
  const scores = metricNames().filter((name) => /^val-core\/[^/]+\/[^/]+$/.test(name)); // of a set as a whole
  const runs = column("run").words;
  const byRun = runs.map((_, code) => state.shown.filter((game) => column("run").codes[game] === code));
  const perRun = (make) => runs.flatMap((run, code) => (byRun[code].length ? make(run, byRun[code], code) : []));
  const named = (name, run) => (runs.length > 1 ? `${name}, ${run}` : name);
  const line = (name, run, code, points, color) => ({ name: named(name, run), points, color, dash: DASHES[code % DASHES.length] });

  const [kind, which, ...rest] = state.plots.curve.split(":");
  const metric = [which, ...rest].join(":");
  const color = (name, code) => (rewards.includes(name) ? roleColor(name.replace(/_reward$/, "")) : PALETTE[code % PALETTE.length]);
  const drawMeans = (names) => lineChart(perRun((run, games, code) => names.map((name) => line(words(name), run, code, means(name, games), color(name, code)))), runs);
  const drawMetrics = (names) => lineChart(names.flatMap((name, place) => runs.map((run, code) => {
    const values = metrics[run].names[name] ?? [];
    const points = metrics[run].steps.map((step, i) => [step, values[i]]).filter(([, x]) => typeof x === "number");
    return line(name.replace("val-core/", ""), run, code, new Map(points), PALETTE[(names.length > 1 ? place : code) % PALETTE.length]);
  })), runs);
  const draw = { roles: () => drawMeans(rewards), mean: () => drawMeans([which]), dots: () => scatter(which, rest[0], state.shown), metric: () => drawMetrics([metric]) };

  const crossed = filters.filter((name) => column(name).words.length > 1).map((name) => [words(name), name]);
  state.plots.down ||= (crossed.find(([, name]) => name !== "outcome" && name !== "run") ?? ["", "outcome"])[1];
  byId("plots").replaceChildren(
    ...perRun((run, games) => [figure([named("outcomes by step", run)], shareChart(games))]),
    scores.length ? figure(["validation: official scores by step"], drawMetrics(scores)) : "",
    figure([chooser("curve", "what to draw", curves())], draw[kind]()),
    crossed.length > 1 ? figure(["games: ", chooser("down", "rows", crossed), " by ", chooser("across", "columns", crossed)],
      [crossTable(state.plots.down, state.plots.across, state.shown)]) : "",
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
  g: () => moveWithin(["run", "step", "uid"]), c: () => column("vignette_id") && moveWithin(["run", "vignette_id"]),
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
  drawHead();
  byId("list").addEventListener("scroll", () => requestAnimationFrame(drawList));
  byId("rows").addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) open(Number(row.dataset.game));
  });
  addEventListener("hashchange", () => open(Number(location.hash.slice(1))));
  addEventListener("keydown", onKey);
  addEventListener("resize", () => { drawList(); drawPlots(); });
  await filter();
  await open(location.hash ? Number(location.hash.slice(1)) : state.data.first);
  document.body.dataset.ready = Math.round(performance.now());
}

start().catch((error) => { byId("game").replaceChildren(element("p", {}, `This page cannot be drawn: ${error}`)); });
