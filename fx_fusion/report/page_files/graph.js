// -- lines: what the middle shows, one after the other ----------------------------------------------------------------
let lines = [];
let places = null; // "graph/row name" -> its row and where it stands; made when first asked, the first rows need none of it

function build() {
  lines = [];
  data.graphs.forEach((g, i) => {
    lines.push({ kind: "title", text: `graph ${g.index}` });
    for (const note of g.notes) lines.push({ kind: "note", text: note });
    for (let b = 0; b < g.blocks.length; ) {
      const block = g.blocks[b];
      let end = b + 1; // equal blocks that follow are folded into this line
      while (block.like >= 0 && end < g.blocks.length && g.blocks[end].like === block.like) end++;
      const same = block.like >= 0 ? g.blocks[block.like].title : "";
      const first = block.title, last = g.blocks[end - 1].title;
      const key = `${i}/${b}`;
      const folded = block.like >= 0 && !state.open.has(key);
      const text = same === "" && block.like < 0 ? first || "outside of layers"
        : `${first || "outside of layers"}${end - b > 1 ? ` to ${last}` : ""}: ${end - b} × the same as ${same || "above"}`;
      lines.push({ kind: "block", text: `${folded ? "▸" : "▾"} ${text}`, key: block.like >= 0 ? key : null });
      for (let at = b; at < end; at++) {
        Object.assign(g.blocks[at], { line: folded ? -1 : lines.length, key });
        if (!folded) for (const row of g.blocks[at].rows) lines.push({ kind: "row", row, graph: i });
      }
      b = end;
    }
  });
  space.style.height = `${lines.length * HEIGHT}px`;
  const widest = lines.reduce((most, line) => Math.max(most, line.kind === "row" ? textOf(line.row).length : 0), 0);
  space.style.width = `${widest + 4}ch`;
  draw();
}

function place(key) { // the row called "graph/name", the block it is in and its number there
  if (!places) {
    places = new Map();
    data.graphs.forEach((g, i) => g.blocks.forEach((block) => block.rows.forEach((row, n) => {
      if (row[1]) places.set(`${i}/${row[1]}`, { row, block, n });
    })));
  }
  return places.get(key);
}

const KINDS = { "-": "minus", "+": "plus", "~": "changed", "=": "" };

function textOf(row) {
  const [sign, , before, after] = row;
  return `${sign === "=" ? " " : sign} ${sign === "~" || sign === "+" ? after || before : before}`;
}

function sitesOf(row) {
  return row[6].filter(visible);
}

function draw() {
  const first = Math.max(0, Math.floor(graph.scrollTop / HEIGHT) - 10);
  const last = Math.min(lines.length, first + Math.ceil(graph.clientHeight / HEIGHT) + 20);
  const linked = new Set();
  if (state.row) for (const n of state.row.row[7]) linked.add(`${state.row.graph}/${numbered(state.row.graph)[n]}`);
  const made = [];
  for (let i = first; i < last; i++) {
    const line = lines[i];
    let names = `row ${line.kind}`;
    let text = line.text;
    let hint;
    if (line.kind === "row") {
      const seen = sitesOf(line.row);
      names = `row ${KINDS[line.row[0]]}`;
      if (seen.length) names += ` site ${data.sites[seen[0]].status}`;
      if (seen.includes(state.site)) names += " picked";
      if (state.row && state.row.row === line.row) names += " picked";
      if (linked.has(`${line.graph}/${line.row[1]}`)) names += " linked";
      if (state.hits[state.hit] && state.hits[state.hit].row === line.row) names += " hit";
      text = textOf(line.row);
      if (line.row[0] === "~") hint = `before: ${line.row[2]}`;
    }
    made.push(element("div", { class: names, title: hint, role: "listitem", style: `top:${i * HEIGHT}px`, "data-line": i }, text));
  }
  space.replaceChildren(...made);
}

function graphAt(index) { // graphs are numbered in the process, not in this page
  return data.graphs.findIndex((one) => one.index === index);
}

const orders = [];
function numbered(g) { // names of rows by the numbers that operands are given as
  if (!orders[g]) {
    const names = new Set();
    for (const block of data.graphs[g].blocks) for (const row of block.rows) names.add(row[1]);
    orders[g] = [...names];
  }
  return orders[g];
}

graph.addEventListener("scroll", draw);
addEventListener("resize", draw);
graph.addEventListener("click", (event) => {
  const at = event.target.closest(".row");
  if (!at) return;
  const line = lines[Number(at.dataset.line)];
  if (line.kind === "block" && line.key) toggle(line.key);
  if (line.kind === "row") pickRow(line);
});

function toggle(key) {
  if (!state.open.delete(key)) state.open.add(key);
  build();
}

function show(key) { // scroll to a row by "graph/name", unfolding what it is in
  const known = place(key);
  if (!known) return;
  if (known.block.line < 0) { state.open.add(known.block.key); build(); }
  graph.scrollTop = Math.max(0, (known.block.line + known.n) * HEIGHT - graph.clientHeight / 3);
  draw();
}
