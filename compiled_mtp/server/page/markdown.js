// Markdown as elements of the page. marked (marked.license.txt) finds the structure; text becomes text nodes only.

import { lexer } from "./marked.js";
import { copyButton } from "./copy.js";

const LINKS = /^(https?:|mailto:)/i;
const INLINE = { strong: "strong", em: "em", del: "del", blockquote: "blockquote", paragraph: "p" };

function element(name, children = []) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

/** Return the elements of a Markdown text; the text itself if its structure is too deep. */
export function render(text) {
  try {
    return nodesOf(lexer(text));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return [element("p", [text])];
  }
}

function nodesOf(tokens) {
  return (tokens ?? []).flatMap((token) => nodeOf(token) ?? []);
}

/** Return the node or nodes of a token; HTML and unknown tokens stay the text that they were. */
function nodeOf(token) {
  const within = () => nodesOf(token.tokens);
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      // The page's own headings end with h3.
      return element(`h${Math.min(6, token.depth + 3)}`, within());
    case "code":
      return codeBlock(token);
    case "codespan":
      return element("code", [token.text]);
    case "br":
    case "hr":
      return element(token.type);
    case "list":
      return list(token);
    case "checkbox":
      return token.checked ? "☑ " : "☐ ";
    case "table":
      return table(token);
    case "link":
      return LINKS.test(token.href) ? link(token.href, within()) : within();
    case "image":
      // Nothing is loaded from other hosts.
      return LINKS.test(token.href) ? link(token.href, [token.text || token.href]) : token.raw;
    case "text":
    case "escape":
      return token.tokens ? within() : token.text;
    default:
      return token.type in INLINE ? element(INLINE[token.type], within()) : token.raw;
  }
}

function link(href, children) {
  const made = element("a", children);
  made.href = href;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  return made;
}

function codeBlock(token) {
  const code = element("code", [token.text]);
  const head = element("div", [element("span", [token.lang ?? ""]), copyButton("Copy code", () => token.text)]);
  head.className = "code-head";
  const block = element("div", [head, element("pre", [code])]);
  block.className = "code-block";
  return block;
}

function list(token) {
  const items = token.items.map((item) => element("li", nodesOf(item.tokens)));
  const made = element(token.ordered ? "ol" : "ul", items);
  if (token.ordered && token.start !== 1) made.start = token.start;
  return made;
}

function table(token) {
  const row = (cells, name) => element("tr", cells.map((cell) => element(name, nodesOf(cell.tokens))));
  const rows = token.rows.map((cells) => row(cells, "td"));
  return element("table", [element("thead", [row(token.header, "th")]), element("tbody", rows)]);
}
