"use strict";
const HEIGHT = 20;
const [graph, space, card, search, found] = ["graph", "space", "card", "search", "found"].map((id) => document.getElementById(id));
const state = { off: new Set(), fusion: "", open: new Set(), site: -1, row: null, hits: [], hit: -1 };
let data = null; // what the page shows, once it is unpacked

async function unpacked(id) { // the text of an element that holds gzip in base64
  const packed = atob(document.getElementById(id).textContent), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i); // Uint8Array.from takes ten times as long
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function read() {
  data = JSON.parse(await unpacked("data"));
  const numbers = (text) => (text ? text.split(" ").map(Number) : []);
  for (const g of data.graphs) for (const block of g.blocks) // from columns: sign, name, before, after, module, location, sites, operands
    block.rows = block.rows.map((name, i) => [block.signs[i], name, block.before[i], block.after[i], block.modules[i], block.at[i],
      numbers(block.sites[i]), numbers(block.operands[i])]);
}

function visible(i) { // whether the filters let a site through
  return !state.off.has(data.sites[i].status) && (!state.fusion || data.sites[i].fusion === state.fusion);
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") made.addEventListener("click", value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children); // strings become text, never HTML
  return made;
}
