// The prefix cache as a picture: prompts grow from left to right, and part where they differ.
// A box is as wide as the tokens that its prompts share from there on, and as high as the number of
// ends below it.

const TREE_WIDTH = 1000;
const ROW = 15;
const MOST_ROWS = 28;

async function readTree() {
  const now = performance.now();
  if (!live.hasTree || now - live.treeAt < TREE_MS) return;
  live.treeAt = now;
  try {
    showTree(await askJson("/cache"));
  } catch (error) {
    if (!(error instanceof Refused)) return;
    live.hasTree = error.status === 503;
    byId("tree-note").textContent = error.message;
  }
}

function showTree(told) {
  const nodes = told.nodes.map((node, index) => ({ ...node, index, children: [], ends: 0, from: 0 }));
  const roots = [];
  for (const node of nodes) (node.parent < 0 ? roots : nodes[node.parent].children).push(node);
  // Parents come first: their start is known before their children's, their ends after.
  for (const node of nodes) node.from = node.parent < 0 ? 0 : nodes[node.parent].from + nodes[node.parent].tokens;
  for (const node of nodes.toReversed()) {
    node.ends = Math.max(1, node.children.reduce((sum, child) => sum + child.ends, 0));
  }
  byId("tree-note").textContent = [
    `${count(told.cached_tokens)} tokens in ${count(told.total_nodes)} pieces`,
    `${count(told.locked_tokens)} tokens in use`,
    ...(told.nodes.length < told.total_nodes ? [`the ${count(told.nodes.length)} used last are drawn`] : []),
  ].join(" · ");
  byId("tree-legend").hidden = nodes.length === 0;
  byId("tree").replaceChildren(nodes.length ? pictureOf(nodes, roots) : make("p", { class: "muted" }, "Nothing is kept yet."));
}

function pictureOf(nodes, roots) {
  const rows = roots.reduce((sum, root) => sum + root.ends, 0);
  const high = Math.max(46, Math.min(rows, MOST_ROWS) * ROW);
  const longest = Math.max(...nodes.map((node) => node.from + node.tokens));
  const scale = { x: TREE_WIDTH / longest, y: high / rows };
  const svg = draw("svg", { viewBox: `0 0 ${TREE_WIDTH} ${high}`, height: high, preserveAspectRatio: "none", role: "img",
    "aria-label": `${nodes.length} pieces of prompts; the longest cached prompt has ${count(longest)} tokens` });
  const mostUses = Math.max(1, ...nodes.map((node) => node.uses));
  const place = (siblings, row) => {
    for (const node of siblings) {
      svg.append(boxOf(node, row, scale, mostUses));
      if (node.hidden) svg.append(moreOf(node, row, scale));
      place(node.children, row);
      row += node.ends;
    }
  };
  place(roots, 0);
  return svg;
}

function boxOf(node, row, scale, mostUses) {
  const words = [`${count(node.tokens)} tokens`, `used ${count(node.uses)} times`, node.locks ? `in use by ${count(node.locks)} now` : "kept for a next time"];
  const shade = 0.35 + 0.65 * (Math.log1p(node.uses) / Math.log1p(mostUses));
  return draw("rect", {
    x: node.from * scale.x, y: row * scale.y, width: node.tokens * scale.x, height: node.ends * scale.y, rx: 2,
    class: node.locks ? "locked" : "kept", "fill-opacity": shade.toFixed(2),
  }, draw("title", {}, words.join(", ")));
}

function moreOf(node, row, scale) {
  const from = (node.from + node.tokens) * scale.x;
  return draw("rect", { class: "more", x: from, y: row * scale.y, width: 8, height: node.ends * scale.y },
    draw("title", {}, `${count(node.hidden)} more below, not drawn`));
}
