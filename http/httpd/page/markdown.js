// A model's Markdown as elements. What a model writes is never read as HTML: each piece becomes a
// text node, and a link goes to http, https or mailto only.

const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const LIST = /^( {0,3})([-*+]|\d{1,9}[.)])\s+(.*)$/;
// Each alternative starts with a character of its own and cannot match two ways: linear time.
const INLINE = /(`{1,3})([^`]+)\1|\*\*([^*\n]+)\*\*|__([^_\n]+)__|\*([^*\s][^*\n]*)\*|\[([^\]\n]{1,300})\]\(([^()\s]{1,2000})\)/g;

function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const [block, next] = readBlock(lines, at);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

// The element that begins at a line, and the line after it.
function readBlock(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = /^(#{1,6})\s+(.*)$/.exec(line);
  if (heading) return [make(heading[1].length < 3 ? "h3" : "h4", {}, ...inline(heading[2])), at + 1];
  if (RULE.test(line)) return [make("hr"), at + 1];
  if (LIST.test(line)) return readList(lines, at);
  if (line.startsWith(">")) return readQuote(lines, at);
  if (line.includes("|") && /^[\s|:-]+$/.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
    return readTable(lines, at);
  }
  return readParagraph(lines, at);
}

function readCode(lines, at, fence) {
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
  const code = make("code", {}, lines.slice(at + 1, end).join("\n"));
  const label = fence[2] ? `Code, ${fence[2]}` : "Code";
  return [make("pre", { tabindex: "0", role: "region", "aria-label": label }, code), end + 1];
}

function readList(lines, at) {
  const ordered = /\d/.test(LIST.exec(lines[at])[2]);
  const start = ordered ? parseInt(LIST.exec(lines[at])[2], 10) : null;
  const list = make(ordered ? "ol" : "ul", start !== null && start !== 1 ? { start } : {});
  while (at < lines.length) {
    const item = LIST.exec(lines[at]);
    if (!item) break;
    const inner = [item[3]];
    at += 1;
    while (at < lines.length && /^(\s{2,}|\t)\S/.test(lines[at])) {
      inner.push(lines[at].replace(/^(\t| {2,4})/, ""));
      at += 1;
    }
    while (at + 1 < lines.length && !lines[at].trim() && LIST.test(lines[at + 1])) at += 1;
    list.append(make("li", {}, ...(inner.length === 1 ? inline(inner[0]) : markdown(inner.join("\n")))));
  }
  return [list, at];
}

function readQuote(lines, at) {
  const inner = [];
  while (at < lines.length && lines[at].startsWith(">")) {
    inner.push(lines[at].replace(/^>\s?/, ""));
    at += 1;
  }
  return [make("blockquote", {}, ...inner.flatMap((line) => [...inline(line), make("br")]).slice(0, -1)), at];
}

function readTable(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, name) => make("tr", {}, ...cells(line).map((cell) => make(name, {}, ...inline(cell))));
  const body = make("tbody");
  const table = make("table", {}, make("thead", {}, row(lines[at], "th")), body);
  at += 2;
  while (at < lines.length && lines[at].includes("|")) {
    body.append(row(lines[at], "td"));
    at += 1;
  }
  return [table, at];
}

function readParagraph(lines, at) {
  const begin = at;
  do at += 1;
  while (at < lines.length && lines[at].trim() && !/^(#{1,6}\s|>| {0,3}(```|~~~))/.test(lines[at]) && !LIST.test(lines[at]));
  const parts = lines.slice(begin, at).flatMap((line) => [make("br"), ...inline(line)]);
  return [make("p", {}, ...parts.slice(1)), at];
}

// Text nodes, and elements for what is marked in it.
function inline(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, bold, alsoBold, italic, label, address] = found;
    if (found.index > at) parts.push(text.slice(at, found.index));
    if (code !== undefined) parts.push(make("code", {}, code));
    else if (bold ?? alsoBold) parts.push(make("strong", {}, bold ?? alsoBold));
    else if (italic !== undefined) parts.push(make("em", {}, italic));
    else parts.push(link(label, address));
    at = found.index + whole.length;
  }
  if (at < text.length) parts.push(text.slice(at));
  return parts;
}

function link(label, address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return `[${label}](${address})`;
  return make("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, label);
}
