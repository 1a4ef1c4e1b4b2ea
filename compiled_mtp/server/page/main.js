// The page: takes prompts, streams answers, and lets the panel show how they were drafted.

import { listModels, ServiceError, setKey, stream } from "./api.js";
import { Answer } from "./answer.js";
import { hideCard, showCard } from "./card.js";
import { Panel } from "./panel.js";
import { blame, forgive, samplingFields, systemPrompt } from "./settings.js";

const byId = (id) => document.getElementById(id);
const prompt = byId("prompt");
const transcript = byId("transcript");
const QUICKSORT = `def quicksort(items):
    """Return a new list with *items* in ascending order."""
    if len(items) <= 1:
        return list(items)
    pivot = items[0]
`;
const STACK = `class Stack:
    """A last-in, first-out container."""

    def __init__(self):
        self._items = []

    def push(self, item):
`;
const EXAMPLES = {
  chat: ["Explain speculative decoding in three sentences.", "Write a Python function that merges two sorted lists."],
  text: [QUICKSORT, STACK],
};
// The checkpoint that ships with the engine continues Python source; it was taught no conversation.
const SHIPPED = "default_model";

let turns = [];
let answers = [];
let running = null;
const panel = new Panel((answer, number) => show(answer, number === null ? null : answer.rounds.list[number], null));

function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

function say(text) {
  byId("status").textContent = text;
}

/** A round under the pointer or the focus: lit in its answer and in the list, with a card beside its text. */
function show(answer, round, span) {
  answer?.light(round ? round.number : null);
  panel.light(answer, round ? round.number : null);
  if (round && span) showCard(round, span);
  else hideCard();
}

function select(answer) {
  const index = answers.indexOf(answer);
  panel.select(answer, answers.length > 1 ? `of answer ${index + 1}` : "");
}

function showError(error) {
  const box = byId("error");
  box.hidden = !error;
  box.textContent = error ? error.message : "";
  forgive();
  if (!error) return;
  blame(error.param);
  if (error.status === 401) openDoor();
}

function openDoor() {
  byId("door").hidden = false;
  byId("key").focus();
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  byId("new").disabled = controller !== null;
}

function requestOf(text) {
  const shared = {
    model: byId("model").value,
    stream: true,
    stream_options: { include_usage: true },
    include_drafts: true,
    ...samplingFields(mode()),
  };
  if (mode() === "text") return ["/v1/completions", { ...shared, prompt: text }];
  const system = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
  return ["/v1/chat/completions", { ...shared, messages: [...system, ...turns, { role: "user", content: text }] }];
}

function begin(text) {
  const isChat = mode() === "chat";
  byId("welcome").hidden = true;
  const answer = new Answer(isChat ? "" : text, (one, round, span) => show(one, round, span));
  if (isChat) {
    const said = document.createElement("p");
    said.className = "said";
    said.textContent = text;
    answer.turn.prepend(said);
  }
  answer.turn.addEventListener("click", () => select(answer));
  answer.turn.setAttribute("aria-label", `Answer ${answers.length + 1}`);
  answers.push(answer);
  transcript.append(answer.turn);
  transcript.scrollTop = transcript.scrollHeight;
  select(answer);
  return answer;
}

/** Follow the end of the answer unless the reader has scrolled away from it. */
function follow(change) {
  const isAtEnd = transcript.scrollTop + transcript.clientHeight >= transcript.scrollHeight - 60;
  change();
  if (isAtEnd) transcript.scrollTop = transcript.scrollHeight;
}

async function send(text) {
  const isChat = mode() === "chat";
  const [path, body] = requestOf(text);
  const controller = new AbortController();
  setRunning(controller);
  showError(null);
  say("Answering");
  const answer = begin(text);
  prompt.value = "";
  try {
    for await (const chunk of stream(path, body, controller.signal)) {
      answer.usage = chunk.usage ?? answer.usage;
      if (chunk.choices.length) follow(() => answer.add(chunk.choices[0]));
      panel.refresh();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finishReason = "stopped";
    else fail(answer, error, text);
  }
  follow(() => answer.end());
  setRunning(null);
  if (isChat && !answer.error) turns.push({ role: "user", content: text }, { role: "assistant", content: answer.content });
  panel.draw();
  if (!answer.error) say(`${answer.finishReason === "stopped" ? "Stopped" : "Complete"}: ${answer.summary()}`);
}

/** What the server refused goes back to where it was typed. */
function fail(answer, error, text) {
  const isKnown = error instanceof ServiceError;
  answer.error = isKnown ? error.message : "The page could not read the answer; the browser's console says why.";
  if (!isKnown) console.error(error);
  if (answer.rounds.numTokens === 0) {
    answers = answers.filter((one) => one !== answer);
    answer.turn.remove();
    prompt.value = prompt.value || text;
    byId("welcome").hidden = answers.length > 0;
    select(answers.at(-1) ?? null);
  }
  say("");
  showError(isKnown ? error : new ServiceError(answer.error));
}

function begins() {
  turns = [];
  answers = [];
  for (const turn of transcript.querySelectorAll(".turn")) turn.remove();
  byId("welcome").hidden = false;
  hideCard();
  showError(null);
  select(null);
  say("");
  prompt.focus();
}

function showMode() {
  const isChat = mode() === "chat";
  prompt.placeholder = isChat ? "Ask something" : "A text to be continued";
  byId("new").textContent = isChat ? "New chat" : "Clear";
  for (const field of document.querySelectorAll(".chat-only")) field.hidden = !isChat;
  byId("examples").replaceChildren(
    ...EXAMPLES[mode()].map((text) => {
      const button = document.createElement("button");
      button.type = "button";
      const words = document.createElement(isChat ? "span" : "code");
      words.textContent = text.split("\n")[0];
      button.append(words);
      button.addEventListener("click", () => {
        prompt.focus();
        if (!running) send(text);
      });
      return button;
    }),
  );
}

async function start() {
  try {
    const models = await listModels();
    byId("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
    byId("door").hidden = true;
    showError(null);
    if (models[0].root === SHIPPED && !answers.length) document.querySelector("input[value=text]").checked = true;
    showMode();
    prompt.focus();
  } catch (error) {
    showError(error);
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running && prompt.value.trim()) send(prompt.value);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideCard();
  running?.abort();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});
byId("new").addEventListener("click", begins);
byId("colours").addEventListener("change", (event) => document.body.classList.toggle("coloured", event.target.checked));
for (const choice of document.querySelectorAll("input[name=mode]")) choice.addEventListener("change", showMode);
byId("enter").addEventListener("click", () => {
  setKey(byId("key").value);
  start();
});
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  byId("enter").click();
});
transcript.addEventListener("scroll", hideCard);

document.body.classList.add("coloured");
showMode();
panel.draw();
start();
