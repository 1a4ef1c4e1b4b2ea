// The rounds in a stream's chunks, as plain objects; nothing here touches the page.

/** Return the outcome of a draft that was kept: found in the text, or kept, if the MTP head made it. */
function keptOf(round) {
  return round.source === "lookup" ? "found" : "kept";
}

/** Return how a round got a token: kept or found (a draft), replaced (a wrong draft), bonus, or plain (no drafts). */
function fateOfToken(round, index) {
  if (round.drafts.length === 0) return "plain";
  if (index < round.accepted) return keptOf(round);
  return round.accepted < round.drafts.length ? "replaced" : "bonus";
}

/** Return the outcome of a draft: kept or found, wrong (a token replaced it), or dropped after a wrong one. */
export function fateOfDraft(round, index) {
  if (index < round.accepted) return keptOf(round);
  return index === round.accepted && round.tokens.length > round.accepted ? "wrong" : "dropped";
}

/**
 * Return a round without the drafts whose tokens came in an earlier chunk: a replica that continues another's stream
 * cuts it elsewhere, and its first round lists all drafts of that round. Id 0 is an unknown draft.
 */
function withoutTold({ drafts, accepted, source }, tokens) {
  const isHere = (at) => drafts.slice(at, accepted).every(({ id }, index) => id === 0 || id === tokens[index].id);
  let at = Math.max(0, accepted - tokens.length);
  while (!isHere(at)) at += 1;
  return { drafts: drafts.slice(at), accepted: accepted - at, source };
}

/** The rounds of one answer as they come, and sums over them. Round 0 is the prompt's: it gives the first token. */
export class Rounds {
  constructor() {
    this.list = [];
    this.numTokens = 0;
    this.drafted = [];
    this.accepted = [];
    this.startMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.decoder = new TextDecoder();
  }

  /** Take a chunk's choice; return the rounds that it adds. */
  add(choice) {
    const tokens = choice.tokens ?? [];
    if (tokens.length === 0) return [];
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    const [first, ...others] = choice.rounds;
    const told = first ? [withoutTold(first, tokens), ...others] : [{ drafts: [], accepted: 0 }];
    let at = 0;
    return told.map((one, index) => {
      const end = index === told.length - 1 ? tokens.length : at + one.accepted + 1;
      const { drafts, accepted, source } = one;
      const round = { number: this.list.length, drafts, accepted, source, tokens: [] };
      const own = tokens.slice(at, end);
      at = end;
      round.tokens = own.map((token) => ({ ...token, text: this.decode(token) }));
      round.fates = round.tokens.map((_, i) => fateOfToken(round, i));
      this.count(round);
      return round;
    });
  }

  // A character's bytes may be spread over several tokens: the last of them gets the character.
  decode(token) {
    return this.decoder.decode(new Uint8Array(token.bytes), { stream: true });
  }

  count(round) {
    this.list.push(round);
    this.numTokens += round.tokens.length;
    round.drafts.forEach((_, index) => {
      this.drafted[index] = (this.drafted[index] ?? 0) + 1;
      this.accepted[index] = (this.accepted[index] ?? 0) + (index < round.accepted);
    });
  }

  /** The number of verify rounds: all except the prompt's. */
  get numRounds() {
    return Math.max(0, this.list.length - 1);
  }

  get tokensPerRound() {
    return this.numRounds ? (this.numTokens - this.list[0].tokens.length) / this.numRounds : null;
  }

  get tokensPerSecond() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    return this.numRounds && seconds > 0 ? (this.numTokens - this.list[0].tokens.length) / seconds : null;
  }

  get firstTokenMs() {
    return this.firstMs === null ? null : this.firstMs - this.startMs;
  }

  get keptShare() {
    const sum = (counts) => counts.reduce((total, count) => total + count, 0);
    return this.drafted.length ? sum(this.accepted) / sum(this.drafted) : null;
  }
}

/**
 * Finds the text of each token in an answer's text. Of a token that a stop string cuts, that is special or that lies
 * between the parts of an answer, less text or none is shown.
 */
export class Placer {
  constructor() {
    this.waiting = [];
    this.parts = [];
    this.last = null;
  }

  /** Take tokens and the text that came with them ([part, text] pairs); return { part, round, index, text } objects. */
  add(rounds, said, isLast) {
    for (const round of rounds) {
      round.tokens.forEach((token, index) => this.waiting.push({ round, index, text: token.text }));
    }
    for (const [part, text] of said) {
      const open = this.parts.at(-1);
      if (open?.part === part) open.text += text;
      else this.parts.push({ part, text });
    }
    const placed = [];
    while (this.waiting.length) {
      const token = this.waiting[0];
      while (this.parts.length > 1 && this.parts[0].text === "") this.parts.shift();
      const rest = this.parts[0]?.text ?? "";
      if (!isLast && (rest === "" || (rest.length < token.text.length && token.text.startsWith(rest)))) {
        // The token has no text yet, or the server holds its text back: wait for more.
        if (this.parts.length < 2 || rest === "") break;
      }
      this.waiting.shift();
      const shown = [token.text, token.text.trimEnd(), token.text.trimStart(), token.text.trim()].find(
        (text) => text !== "" && rest.startsWith(text),
      );
      if (shown !== undefined) placed.push(this.take(token, shown.length));
      else if (rest !== "" && token.text.startsWith(rest)) placed.push(this.take(token, rest.length));
    }
    // No token is left for the remaining text: it goes to the last one.
    while (this.waiting.length === 0 && this.parts.length && (this.parts[0].text || this.parts.length > 1)) {
      if (this.parts[0].text) placed.push(this.take(this.last, this.parts[0].text.length));
      else this.parts.shift();
    }
    return placed;
  }

  take(token, length) {
    const open = this.parts[0];
    const text = open.text.slice(0, length);
    open.text = open.text.slice(length);
    this.last = token;
    return { part: open.part, round: token?.round ?? null, index: token?.index ?? 0, text };
  }
}

/** A number with its noun: 1 token, 2 tokens. */
export function counted(number, one, several = `${one}s`) {
  return `${number} ${number === 1 ? one : several}`;
}

/** Return a token's text for a list, with signs for line breaks, tabs and spaces. */
export function visible(token) {
  const text = token.bytes.length ? token.token : token.token || `#${token.id}`;
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}
