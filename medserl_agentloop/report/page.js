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
const fold = (label, content, open = false) => element("details", open ? { open: "" } : {}, element("summary", {}, label), content);

function pieces(marked, kind) {
  let left = MOST_CHARACTERS;
  const shown = [];
  for (const [mark, words] of marked) {
    const some = words.slice(0, left);
    if (some) shown.push(mark ? element(mark, {}, some) : some);
    left -= some.length;
  }
  const more = marked.reduce((sum, [, words]) => sum + words.length, left - MOST_CHARACTERS);
  return element("pre", kind ? { class: kind } : {}, ...shown, more ? element("em", {}, ` … ${more} more characters are in the games file`) : "");
}

const text = (content, kind) => pieces([["", content ?? ""]], kind);

// ---- filters -------------------------------------------------------------------------------------------------------

const FRONT = ["outcome", "category"]; // with the text; the other filters are under "more"

function makeFilters() {
  const form = byId("filters");
  const front = FRONT.filter((name) => state.data.filters.includes(name));
  for (const name of [...front, ...state.data.filters.filter((other) => !front.includes(other))]) {
    const c = column(name);
    if (c.words.length < 2) continue;
    const select = element("select", { "data-filter": name, "aria-label": words(name), title: state.data.meanings[name] }, new Option(name === "category" ? "any kind" : `any ${words(name)}`, ""));
    c.words.forEach((word, code) => select.append(new Option(`${words(name)}: ${word === null ? "none" : words(word)}`, code)));
    select.addEventListener("change", () => want(name, select.value === "" ? null : Number(select.value)));
    if (front.includes(name)) form.insertBefore(select, byId("text"));
    else byId("others").prepend(select);
  }
  for (const id of ["first", "last"]) byId(id).addEventListener("input", filter);
  let waiting;
  byId("text").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 250); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    state.wanted.clear();
    for (const select of document.querySelectorAll("[data-filter]")) select.classList.remove("set");
    setTimeout(filter);
  });
}

function want(name, code) {
  if (code === null) state.wanted.delete(name);
  else state.wanted.set(name, code);
  const select = document.querySelector(`[data-filter="${name}"]`);
  if (select) {
    select.value = code === null ? "" : code;
    select.classList.toggle("set", code !== null);
  }
  return filter();
}

// What is set, each with a button that takes it back.
function drawSet() {
  const set = [...state.wanted].map(([name, code]) => {
    const word = column(name).words[code];
    return [`${name === "category" ? "kind" : words(name)}: ${word === null ? "none" : words(word)}`, () => want(name, null)];
  });
  const [first, last] = ["first", "last"].map((id) => byId(id).value);
  const clear = (...ids) => () => { for (const id of ids) byId(id).value = ""; filter(); };
  if (first || last) set.push([first === last ? `step ${first}` : `steps ${first || "first"} to ${last || "last"}`, clear("first", "last")]);
  if (byId("text").value.trim()) set.push([`text: ${byId("text").value.trim().slice(0, 30)}`, clear("text")]);
  byId("set").replaceChildren(...set.map(([label, onclick]) => element("button", { type: "button", title: "take it back", onclick }, `${label} ×`)));
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
  const list = byId("list");
  const seen = state.shown.slice(Math.ceil(list.scrollTop / ROW_HEIGHT), Math.floor((list.scrollTop + list.clientHeight) / ROW_HEIGHT));
  const anchor = seen.includes(state.chosen) ? state.chosen : seen[0]; // stays where it is on the screen
  const above = state.shown.indexOf(anchor) * ROW_HEIGHT - list.scrollTop;
  state.shown = games;
  const { games: all, played } = state.data;
  byId("count").textContent = `${games.length} of ${all} games` + (played > all ? ` (a sample of ${played})` : "");
  byId("rows").style.height = games.length * ROW_HEIGHT + "px";
  if (games.includes(anchor)) list.scrollTop = games.indexOf(anchor) * ROW_HEIGHT - above;
  drawSet();
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

const isNarrow = () => innerWidth <= 800;
const severalRuns = () => column("run").words.length > 1;
const ofList = () => [
  ...(severalRuns() ? ["run"] : []), "step", ...(column("category") && !isNarrow() ? ["category"] : []), "outcome", ...state.data.rewards,
];

function drawHead() {
  const wide = { run: isNarrow() ? "48px" : "62px", step: "30px", category: "122px", outcome: "minmax(100px, 1fr)" };
  byId("list").style.setProperty("--columns", ofList().map((name) => wide[name] ?? "52px").join(" "));
  byId("head").replaceChildren(...ofList().map((name) => element("span", {}, name === "category" ? "kind" : words(name))));
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
      if (name === "run") return element("span", { class: "run", title: found }, element("bdi", {}, words(found)));
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
    reasoning === null ? "" : fold("reasoning", text(reasoning), reasoning.length < 600),
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

const PLOT = { width: 300, height: 128, left: 40, right: 8, top: 6, bottom: 18 };

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

function stepMarks({ svg, x }, steps, runs, read) {
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
    svg.append(drawn("rect", { class: "step", x: x(step) - wide / 2, y: top, width: wide, height: height - top - bottom, onclick: () => wantStep(step), onpointerenter: () => read(step) },
      drawn("title", {}, `step ${step}: click for its games alone`)));
  svg.addEventListener("pointerleave", () => read(null));
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
  const plot = series[0].percent ? frame(steps, 0, 1, 0) : frame(steps, low === high ? low - 0.5 : low, low === high ? high + 0.5 : high, large >= 100 ? 0 : low < high && large < 0.1 ? 4 : 2);
  for (const { points, color, dash, name, rest } of series) {
    const path = steps.filter((step) => points.has(step)).map((step) => `${plot.x(step).toFixed(1)} ${plot.y(points.get(step)).toFixed(1)}`);
    plot.svg.append(drawn("path", rest ? { d: "M" + path.join("L"), class: "rest" }
      : { d: "M" + path.join("L"), fill: "none", "stroke-width": 1.7, "stroke-dasharray": dash, style: { stroke: color } }, drawn("title", {}, name)));
    if (path.length === 1) plot.svg.append(drawn("circle", { cx: plot.x(steps[0]), cy: plot.y(points.values().next().value), r: 2.5, style: { fill: color } }));
  }
  const own = series.filter(({ rest }) => !rest);
  const labels = [...new Set(own.map(({ label }) => label))]; // the dashes of several runs stand at their names
  const said = ({ points, percent }, step) => {
    const x = points.get(step ?? [...points.keys()].at(-1));
    return x === undefined ? "-" : percent ? `${Math.round(100 * x)} %` : `${+x.toPrecision(3)}`;
  };
  const read = (step) => labels.forEach((label, k) => {
    entries.children[k].lastChild.textContent = own.filter((one) => one.label === label).map((one) => said(one, step)).join(", ");
  });
  const marks = stepMarks(plot, steps, runs, read);
  const entries = legend([...labels.map((label) => [label, own.find((one) => one.label === label).color, ""]), ...marks]);
  read(null);
  return [plot.svg, entries];
}

// Names with their colours, each with room for its value at the step that is pointed at.
function legend(entries) {
  return element("div", { class: "legend" }, ...entries.map(([name, color, dash]) => {
    const line = { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 2, "stroke-dasharray": dash, style: { stroke: color } };
    const swatch = dash === undefined ? drawn("rect", { width: 9, height: 9, style: { fill: color } }) : drawn("line", line);
    return element("span", {}, drawn("svg", { class: "swatch", width: dash === undefined ? 9 : 22, height: 10 }, swatch), `${name} `, element("output"));
  }));
}

// The outcomes of all games of a run, stacked; what the filters leave out is grey.
function shareChart(games, shown, named = true) {
  const outcomes = column("outcome");
  const rank = (code) => Object.keys(SIGNS).indexOf(outcomes.words[code]);
  const order = outcomes.words.map((_, code) => code).sort((a, b) => rank(a) - rank(b));
  const counted = (games) => {
    const counts = new Map();
    for (const game of games) {
      const step = value("step", game);
      if (!counts.has(step)) counts.set(step, new Float64Array(outcomes.words.length));
      counts.get(step)[outcomes.codes[game]]++;
    }
    return counts;
  };
  const [counts, left] = [counted(games), counted(shown)];
  const steps = [...counts.keys()].sort((a, b) => a - b);
  if (!steps.length) return [element("p", {}, "nothing to draw")];
  const plot = frame(steps, 0, 1, 0);
  // A single step is drawn as a bar, from edge to edge.
  const places = steps.length > 1 ? steps.map(plot.x) : [PLOT.left, PLOT.width - PLOT.right];
  const rows = steps.length > 1 ? steps : [steps[0], steps[0]];
  let below = rows.map(() => 0);
  for (const code of order) {
    const total = (step) => counts.get(step).reduce((a, b) => a + b);
    const over = (counts) => rows.map((step, k) => below[k] + (counts.get(step)?.[code] ?? 0) / total(step));
    const edge = (heights) => heights.map((h, k) => `${places[k].toFixed(1)} ${plot.y(h).toFixed(1)}`);
    const area = (heights) => "M" + [...edge(heights), ...edge(below).reverse()].join("L") + "Z";
    const name = outcomes.words[code];
    const above = over(counts);
    if (shown.length < games.length) plot.svg.append(drawn("path", { d: area(above), class: "rest", style: { fill: "var(--line)", stroke: "none" } }));
    plot.svg.append(drawn("path", { d: area(over(left)), style: { fill: outcomeColor(name) } }, drawn("title", {}, words(name))));
    below = above;
  }
  const read = (step) => order.forEach((code, k) => {
    const of = counts.get(step);
    if (named) entries.children[k].lastChild.textContent = of ? `${Math.round((100 * of[code]) / of.reduce((a, b) => a + b))} %` : "";
  });
  const marks = stepMarks(plot, steps, [...new Set(games.map((game) => value("run", game)))], read);
  const entries = legend([...order.map((code) => outcomes.words[code]).map((name) => [`${sign(name)} ${words(name)}`, outcomeColor(name)]), ...marks]);
  return named ? [plot.svg, entries] : [plot.svg];
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

function figure(caption, children, attributes = {}) {
  return element("figure", attributes, element("figcaption", {}, ...caption), ...children);
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
  const { rewards, metrics, filters, runs: about } = state.data;
  const runs = column("run").words;
  const all = gamesThat(() => true);
  const filtered = state.shown.length < all.length;
  const isOf = (code) => (game) => column("run").codes[game] === code;
  const several = runs.length > 1;
  const dash = (code) => DASHES[code % DASHES.length];
  const line = (name, code, points, color, more = {}) => ({ label: name, name: several ? `${name}, ${runs[code]}` : name, points, color, dash: dash(code), ...more });

  const [kind, which, ...rest] = state.plots.curve.split(":");
  const metric = [which, ...rest].join(":");
  const color = (name, code) => (rewards.includes(name) ? roleColor(name.replace(/_reward$/, "")) : PALETTE[code % PALETTE.length]);
  const drawMeans = (names) => lineChart(runs.flatMap((_, code) => names.flatMap((name) => {
    const [whole, left] = [all, state.shown].map((games) => means(name, games.filter(isOf(code))));
    const own = line(words(name), code, left, color(name, code));
    return filtered ? [line(words(name), code, whole, "", { rest: true }), own] : [own];
  })), runs);
  const ofMetric = (name, k) => runs.map((run, code) => {
    const values = metrics[run].names[name] ?? [];
    const points = metrics[run].steps.map((step, i) => [step, values[i]]).filter(([, x]) => typeof x === "number");
    return line(name.replace("val-core/", ""), code, new Map(points), PALETTE[k % PALETTE.length]);
  });
  const drawMetric = (name) => lineChart(ofMetric(name, 0), runs);
  const draw = { roles: () => drawMeans(rewards), mean: () => drawMeans([which]), dots: () => scatter(which, rest[0], state.shown), metric: () => drawMetric(metric) };
  const gained = about.flatMap(({ curves }, code) => curves.map(([label, points], k) => line(label, code, new Map(points), PALETTE[(k + 2) % PALETTE.length], { percent: true })));
  // Of a game that names no gains: verl's core metrics of a data set as a whole.
  if (!gained.length) gained.push(...metricNames().filter((name) => /^val-core\/[^/]+\/[^/]+$/.test(name)).flatMap(ofMetric));

  const crossed = filters.filter((name) => column(name).words.length > 1).map((name) => [words(name), name]);
  state.plots.down ||= (crossed.find(([, name]) => name !== "outcome" && name !== "run") ?? ["", "outcome"])[1];
  const figures = [
    ...(gained.length ? [[["held-out validation by step"], () => lineChart(gained, runs)]] : []),
    ...runs.map((run, code) => [[several ? `outcomes by step, ${run}` : "outcomes by step"],
      () => shareChart(all.filter(isOf(code)), state.shown.filter(isOf(code)), code === 0)]),
    [[chooser("curve", "what to draw", curves())], () => draw[kind]()],
  ];
  // As many in a row as have room, each as wide as that leaves it.
  const table = crossed.length > 1 && !isNarrow() ? figure(["games: ", chooser("down", "rows", crossed), " by ", chooser("across", "columns", crossed)],
    [crossTable(state.plots.down, state.plots.across, state.shown)]) : "";
  byId("plots").replaceChildren(table);
  const [gap, least, room] = [22, 240, byId("plots").clientWidth - 28];
  const left = table ? room - table.offsetWidth - gap : room;
  const inOneRow = (left + gap) / figures.length - gap >= least;
  const across = inOneRow ? figures.length : Math.max(1, Math.min(figures.length, Math.floor((room + gap) / (least + gap))));
  PLOT.width = Math.floor(((inOneRow ? left : room) + gap) / across - gap);
  byId("plots").replaceChildren(...figures.map(([caption, make]) => figure(caption, make(), { style: { width: PLOT.width + "px" } })), table);
}

// The first screen: what each run was, and what was gained.
function drawRuns() {
  const names = column("run").words;
  byId("runs").replaceChildren(...state.data.runs.map(({ facts, caveats, headline }, code) => {
    const said = Object.entries(facts).map(([name, fact]) => (name === "date" ? fact : `${name} ${fact}`)).join(" · ");
    const dashed = names.length > 1 ? legend([["", "var(--text)", DASHES[code % DASHES.length]]]).firstChild.firstChild : "";
    const head = [
      element("p", {}, dashed, element("h1", {}, names[code]), element("span", { class: "facts" }, ` ${said}`)),
      element("p", { class: headline ? "gained" : "facts" }, headline ?? "no held-out validation: set data.val_files and trainer.test_freq"),
      ...caveats.map((caveat) => element("p", { class: "caveat" }, caveat)),
    ];
    return element("section", {}, ...head);
  }));
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
  document.title = `Games: ${column("run").words.join(", ")}`;
  drawRuns();
  makeFilters();
  drawHead();
  byId("list").addEventListener("scroll", () => requestAnimationFrame(drawList));
  byId("rows").addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) open(Number(row.dataset.game));
  });
  addEventListener("hashchange", () => open(Number(location.hash.slice(1))));
  addEventListener("keydown", onKey);
  addEventListener("resize", () => { drawHead(); drawList(); drawPlots(); });
  await filter();
  await open(location.hash ? Number(location.hash.slice(1)) : state.data.first);
  document.body.dataset.ready = Math.round(performance.now());
}

start().catch((error) => { byId("game").replaceChildren(element("p", {}, `This page cannot be drawn: ${error}`)); });
