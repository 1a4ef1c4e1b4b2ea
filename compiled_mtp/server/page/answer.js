// One answer in the conversation: its text, round by round, in the colours of what became of the drafts.

import { Placer, Rounds } from "./rounds.js";

export class Answer {
  /** `show(answer, round, element)` is called for the round under the pointer or the focus, null when it is left. */
  constructor(given, show) {
    this.rounds = new Rounds();
    this.content = "";
    this.usage = null;
    this.finishReason = null;
    this.error = null;
    this.isLeftOut = false;
    this.isRunning = true;
    this.placer = new Placer();
    this.spans = new Map();
    this.show = show;
    this.turn = document.createElement("article");
    this.turn.className = "turn";
    this.reasoning = this.part("answer reasoning");
    this.body = this.part("answer live");
    this.foot = document.createElement("p");
    this.foot.className = "foot";
    this.turn.append(this.foot);
    if (given) {
      const prompt = document.createElement("span");
      prompt.className = "given";
      prompt.textContent = given;
      this.body.append(prompt);
    }
    this.listen();
  }

  part(className) {
    const element = document.createElement("div");
    element.className = className;
    this.turn.append(element);
    return element;
  }

  /** Take a choice of a chunk; return the rounds that it added. */
  add(choice) {
    const said = [];
    if (choice.delta?.reasoning_content) said.push(["reasoning", choice.delta.reasoning_content]);
    const text = choice.delta ? choice.delta.content : choice.text;
    if (text) said.push(["body", text]);
    this.content += text ?? "";
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const rounds = this.rounds.add(choice);
    this.put(this.placer.add(rounds, said, choice.finish_reason != null));
    return rounds;
  }

  put(pieces) {
    for (const { part, round, index, text } of pieces) {
      const token = document.createElement("span");
      token.className = `token ${round ? round.fates[index] : "plain"}${text.trim() ? "" : " blank"}`;
      token.textContent = text;
      this.place(part, round).append(token);
    }
  }

  /** The element of a round in a part of the answer. The first of all can be reached with the Tab key. */
  place(part, round) {
    const parent = part === "reasoning" ? this.reasoning : this.body;
    if (!round) return parent;
    const known = this.spans.get(round.number) ?? [];
    let span = known.find((one) => one.parentElement === parent);
    if (!span) {
      span = document.createElement("span");
      span.className = "round";
      span.tabIndex = this.spans.size ? -1 : 0;
      span.dataset.round = round.number;
      // It can have the focus, so that it needs a name; the card says the rest.
      span.setAttribute("role", "group");
      span.setAttribute("aria-label", round.number ? `Round ${round.number}` : "The prompt’s round");
      parent.append(span);
      this.spans.set(round.number, [...known, span]);
    }
    return span;
  }

  /** Light the spans of a round, or none. */
  light(number) {
    for (const span of this.turn.querySelectorAll(".round.shown")) span.classList.remove("shown");
    for (const span of this.spans.get(number) ?? []) span.classList.add("shown");
  }

  end() {
    this.isRunning = false;
    this.turn.classList.toggle("left-out", this.isLeftOut);
    this.body.classList.remove("live");
    this.put(this.placer.add([], [], true));
    this.foot.textContent = this.summary();
    this.foot.classList.toggle("wrong", this.error !== null);
  }

  summary() {
    const { numTokens, numRounds } = this.rounds;
    const ends = { stop: "the model ended it", length: "cut at the most tokens", stopped: "stopped by you" };
    const words = [`${numTokens} ${numTokens === 1 ? "token" : "tokens"} in ${numRounds + (numTokens > 0)} forward passes`];
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (this.usage) words.push(`prompt of ${this.usage.prompt_tokens}${cached ? `, ${cached} of them cached` : ""}`);
    const said = this.error ? [this.error] : [...words, ends[this.finishReason] ?? ""];
    return [...said, this.isLeftOut ? "not part of the chat" : ""].filter(Boolean).join(" · ");
  }

  listen() {
    const roundOf = (event) => event.target.closest?.(".round") ?? null;
    const show = (span) => this.show(this, span && this.rounds.list[Number(span.dataset.round)], span);
    this.turn.addEventListener("pointerover", (event) => show(roundOf(event)));
    this.turn.addEventListener("pointerleave", () => show(null));
    this.turn.addEventListener("focusin", (event) => roundOf(event) && show(roundOf(event)));
    this.turn.addEventListener("focusout", () => show(null));
    this.turn.addEventListener("keydown", (event) => this.walk(event, roundOf(event)));
  }

  walk(event, span) {
    const spans = [...this.turn.querySelectorAll(".round")];
    const at = spans.indexOf(span);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: spans.length - 1 }[event.key];
    if (at < 0 || to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const next = spans[Math.min(Math.max(to, 0), spans.length - 1)];
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
