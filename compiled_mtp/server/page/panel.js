// The numbers next to the conversation: tiles, acceptance by index, and the list of one answer's rounds.

import { counted, fateOfDraft, visible } from "./rounds.js";

// The pause between two drawings during an answer: numbers that change with every frame cannot be read.
const PAUSE_MS = 100;
// Drafts at a position of the round from which on a bar says something about the share of them that is kept.
const LEAST_DRAFTS = 4;
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function chip(fate, token, word) {
  const made = element("span", `chip ${fate}`, visible(token));
  made.append(element("span", "unseen", ` (${word}) `));
  return made;
}

/** Return a round's drafts with their outcome, then the model's own token. */
export function chips(round) {
  const row = element("span", "chips");
  round.drafts.forEach((token, index) => {
    const fate = fateOfDraft(round, index);
    row.append(chip(fate, token, { wrong: "wrong draft", found: "kept draft from the text" }[fate] ?? `${fate} draft`));
  });
  const own = round.tokens.slice(round.accepted);
  if (own.length && round.drafts.length) row.append(element("span", "arrow", "→"));
  own.forEach((token, index) => {
    const fate = round.fates[round.accepted + index];
    row.append(chip(fate, token, { replaced: "the model’s token", bonus: "bonus token" }[fate] ?? "token"));
  });
  return row;
}

/** Return one sentence about a round. */
export function describe(round) {
  if (round.number === 0) return "The prompt’s forward pass produced the first token.";
  const gained = `${counted(round.tokens.length, "token")} from one forward pass`;
  if (!round.drafts.length) return `Round ${round.number}: no drafts, ${gained}.`;
  const drafts = round.source === "lookup" ? "drafts from the text" : "drafts";
  return `Round ${round.number}: ${round.accepted} of ${round.drafts.length} ${drafts} kept, ${gained}.`;
}

export class Panel {
  /** `light(number)` is called for the round under the pointer in the list, and with null after it. */
  constructor(light) {
    this.answer = null;
    this.numListed = 0;
    this.timer = null;
    this.list = byId("rounds");
    const numberOf = (event) => event.target.closest?.("li")?.dataset.round;
    this.list.addEventListener("pointerover", (event) => light(this.answer, numberOf(event) ?? null));
    this.list.addEventListener("pointerleave", () => light(this.answer, null));
  }

  /** Show an answer; `scope` names it in words. */
  select(answer, scope) {
    byId("scope").textContent = scope;
    if (answer !== this.answer) {
      this.answer = answer;
      this.list.replaceChildren();
      this.numListed = 0;
    }
    this.draw();
  }

  /** Draw within PAUSE_MS, once for all chunks that come until then. */
  refresh() {
    this.timer ??= setTimeout(() => this.draw(), PAUSE_MS);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const rounds = this.answer?.rounds;
    const say = (id, value, digits = 0, unit = "") => {
      const isKnown = value !== null && value !== undefined;
      byId(id).textContent = isKnown ? value.toFixed(digits) : "–";
      if (isKnown && unit) byId(id).append(element("small", "", unit));
    };
    const [speed, first] = [rounds?.tokensPerSecond, rounds?.firstTokenMs];
    say("speed", speed, speed < 100 ? 1 : 0);
    say("per-round", rounds?.tokensPerRound, 2);
    say("kept", rounds && rounds.keptShare !== null ? rounds.keptShare * 100 : null, 0, "%");
    if (first >= 1000) say("first", first / 1000, 1, "s");
    else say("first", first, 0, "ms");
    drawChart(byId("chart"), rounds?.drafted ?? [], rounds?.accepted ?? []);
    this.listNew();
  }

  listNew() {
    const rounds = this.answer?.rounds.list ?? [];
    const isAtEnd = this.list.scrollTop + this.list.clientHeight >= this.list.scrollHeight - 40;
    const isGrowing = this.numListed > 0 || this.answer?.isRunning;
    for (; this.numListed < rounds.length; this.numListed += 1) {
      const round = rounds[this.numListed];
      const row = document.createElement("li");
      row.dataset.round = round.number;
      row.append(element("span", "number", round.number === 0 ? "prompt" : String(round.number)), chips(round));
      this.list.append(row);
    }
    if (isAtEnd && isGrowing) this.list.scrollTop = this.list.scrollHeight;
  }

  /** Highlight a round of an answer in the list. */
  light(answer, number) {
    for (const row of this.list.querySelectorAll(".shown")) row.classList.remove("shown");
    const row = answer === this.answer && number !== null ? this.list.children[number] : null;
    if (!row) return;
    row.classList.add("shown");
    if (!answer.isRunning) {
      const top = row.offsetTop - this.list.offsetTop;
      const isSeen = top >= this.list.scrollTop && top + row.offsetHeight <= this.list.scrollTop + this.list.clientHeight;
      if (!isSeen) this.list.scrollTop = top - this.list.clientHeight / 2;
    }
  }
}

function drawChart(svg, drafted, accepted) {
  const make = (name, attributes, text = "") => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };
  const [width, top, base] = [340, 18, 96];
  const count = Math.max(drafted.length, 1);
  const step = width / count;
  const thick = Math.min(48, step * 0.6);
  const shapes = [];
  const words = [];
  drafted.forEach((total, index) => {
    const rate = accepted[index] / total;
    const [middle, height] = [step * (index + 0.5), (base - top) * rate];
    const box = { x: middle - thick / 2, width: thick, rx: 4 };
    const isKnown = total >= LEAST_DRAFTS;
    shapes.push(make("rect", { ...box, class: "room", y: top, height: base - top }));
    if (isKnown) shapes.push(make("rect", { ...box, class: "bar-kept", y: base - height, height }));
    shapes.push(
      make("text", { class: "value", x: middle, y: top - 6 }, isKnown ? `${Math.round(rate * 100)}%` : "–"),
      make("text", { x: middle, y: base + 15 }, `draft ${index + 1}`),
    );
    words.push(`draft ${index + 1}: ${accepted[index]} of ${total} kept`);
  });
  if (!drafted.length) shapes.push(make("text", { x: width / 2, y: 60 }, "No drafts yet"));
  svg.replaceChildren(...shapes);
  svg.setAttribute("aria-label", words.join("; ") || "No drafts yet");
}
