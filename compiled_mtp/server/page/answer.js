// One answer in the conversation: its text by rounds, coloured by the outcome of the drafts.

import { copyButton } from "./copy.js";
import { render } from "./markdown.js";
import { counted, Placer, Rounds } from "./rounds.js";

export class Answer {
  /**
   * `asked` is the prompt of a chat, or the text to complete. `show(answer, round, element)` is called for the round
   * under the pointer or the focus, and with null after it.
   */
  constructor(asked, isChat, show) {
    this.asked = asked;
    this.isChat = isChat;
    const given = isChat ? "" : asked;
    this.rounds = new Rounds();
    this.content = "";
    this.usage = null;
    this.finishReason = null;
    this.error = null;
    this.isLeftOut = false;
    this.isRunning = true;
    this.placer = new Placer();
    this.isLineStart = { reasoning: true, body: /(^|\n)\s*$/.test(given) };
    this.spans = new Map();
    this.show = show;
    this.turn = document.createElement("article");
    this.turn.className = "turn";
    this.reasoning = this.part("answer reasoning");
    this.body = this.part("answer live");
    // The answer as Markdown, in the place of its tokens while `format(true)` holds.
    this.formatted = this.part("markdown");
    this.formatted.hidden = true;
    this.isDrawing = false;
    this.foot = document.createElement("p");
    this.foot.className = "foot";
    this.actions = this.part("actions");
    this.actions.hidden = true;
    this.turn.append(this.foot, this.actions);
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
    if (text && !this.formatted.hidden) this.drawSoon();
    return rounds;
  }

  put(placed) {
    for (const { part, round, index, text } of placed) {
      const token = document.createElement("span");
      token.className = `token ${round ? round.fates[index] : "plain"}`;
      token.append(...this.marked(part, text));
      this.elementOf(part, round).append(token);
    }
  }

  /** Show the answer of a chat as Markdown, or its tokens. */
  format(isFormatted) {
    if (!this.isChat) return;
    this.formatted.hidden = !isFormatted;
    this.body.hidden = isFormatted;
    if (isFormatted) this.draw();
  }

  /** Draw the Markdown once for all text that comes until the browser's next frame. */
  drawSoon() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.isDrawing = false;
    this.formatted.replaceChildren(...render(this.content));
  }

  /** Offer to copy the answer, and the actions [label, act]. */
  offer(actions) {
    const buttons = actions.map(([label, act]) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "small";
      button.textContent = label;
      button.addEventListener("click", () => act(this));
      return button;
    });
    this.actions.replaceChildren(copyButton("Copy", () => this.content), ...buttons);
    this.actions.hidden = false;
  }

  /** Return a token's text as nodes: marked, except line breaks and the indentation of a line. */
  marked(part, text) {
    const line = this.isLineStart[part] ? `\n${text}` : text;
    const stretches = line.split(/(\s*\n\s*)/);
    if (this.isLineStart[part]) stretches[1] = stretches[1].slice(1);
    this.isLineStart[part] = /\n\s*$/.test(line);
    return stretches.flatMap((stretch, index) => {
      if (stretch === "" || index % 2) return stretch;
      const mark = document.createElement("span");
      mark.className = "mark";
      mark.textContent = stretch;
      return mark;
    });
  }

  /** Return the element of a round in a part of the answer. The Tab key reaches the first round's element. */
  elementOf(part, round) {
    const parent = part === "reasoning" ? this.reasoning : this.body;
    if (!round) return parent;
    const known = this.spans.get(round.number) ?? [];
    let span = known.find((one) => one.parentElement === parent);
    if (!span) {
      span = document.createElement("span");
      span.className = "round";
      span.tabIndex = this.spans.size ? -1 : 0;
      span.dataset.round = round.number;
      // An element that can have the focus needs a name; the card holds the details.
      span.setAttribute("role", "group");
      span.setAttribute("aria-label", round.number ? `Round ${round.number}` : "Prompt round");
      parent.append(span);
      this.spans.set(round.number, [...known, span]);
    }
    return span;
  }

  /** Highlight the spans of a round; null highlights none. */
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
    const ends = { stop: "finished", length: "token limit reached", stopped: "stopped by you" };
    const words = [`${counted(numTokens, "token")} in ${counted(numRounds + (numTokens > 0), "forward pass", "forward passes")}`];
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (this.usage) words.push(`${counted(this.usage.prompt_tokens, "prompt token")}${cached ? ` (${cached} cached)` : ""}`);
    const said = this.error ? [this.error] : [...words, ends[this.finishReason] ?? ""];
    return [...said, this.isLeftOut ? "not included in the chat" : ""].filter(Boolean).join(" · ");
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
