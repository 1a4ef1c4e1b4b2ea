// The page: takes prompts, streams answers, and lets the panel show how they were drafted.

import { listModels, ServiceError, setKey, stream } from "./api.js";
import { Answer } from "./answer.js";
import { hideCard, isCardOpen, showCard } from "./card.js";
import { ImageTray, shown, withImages } from "./images.js";
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
// The checkpoint that ships with the engine continues Python source; it was not trained on conversations.
const SHIPPED = "default_model";

let answers = [];
// The answer whose prompt is being edited; null for none.
let edited = null;
let running = null;
let isModeSettled = false;
const tray = new ImageTray(
  byId("images"),
  (error) => showError(error),
  () => turnsBefore(edited).reduce((count, one) => count + one.images.length, 0),
);
const panel = new Panel((answer, number) => show(answer, number === null ? null : answer.rounds.list[number], null));

function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

function say(text) {
  byId("status").textContent = text;
}

/** Highlight the round under the pointer or the focus in its answer and in the list, and show its card. */
function show(answer, round, span) {
  answer?.light(round ? round.number : null);
  panel.light(answer, round ? round.number : null);
  if (round && span) showCard(round, span);
  else hideCard();
}

function select(answer) {
  const index = answers.indexOf(answer);
  panel.select(answer, answers.length > 1 ? `in answer ${index + 1}` : "");
}

function showError(error) {
  const box = byId("error");
  box.hidden = !error;
  box.textContent = error ? error.message : "";
  forgive();
  if (!error) return;
  blame(error.param);
  if (error.status === 401) askForKey();
}

function askForKey() {
  byId("key-form").hidden = false;
  byId("key").focus();
}

/** Return whether an input method is composing and takes the keys. Safari reports it by key code 229 alone. */
function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}

function setRunning(controller) {
  const focused = document.activeElement?.id;
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  byId("new").disabled = controller !== null;
  // Hiding the button that has the focus would lose the focus.
  if (controller && focused === "send") byId("stop").focus();
  if (!controller && focused === "stop") prompt.focus();
}

/** Return the chat's turns before `end`, an answer that will be replaced; null for all. */
function turnsBefore(end) {
  const kept = end === null ? answers : answers.slice(0, answers.indexOf(end));
  return kept.filter((one) => one.isChat && !one.isLeftOut);
}

/** Return the messages of the chat before `end`, as `turnsBefore` takes it. */
function history(end) {
  return turnsBefore(end).flatMap((one) => [
    { role: "user", content: withImages(one.asked, one.images) },
    { role: "assistant", content: one.content },
  ]);
}

/** Remove the answers of the chat from one on. */
function dropFrom(first) {
  const at = answers.indexOf(first);
  const dropped = answers.filter((one, index) => index >= at && one.isChat);
  answers = answers.filter((one) => !dropped.includes(one));
  for (const one of dropped) one.turn.remove();
}

function edit(answer) {
  edited = answer;
  byId("editing").hidden = answer === null;
  if (answer === null) return;
  chooseModeOf(answer);
  prompt.value = answer.asked;
  tray.put(answer.images);
  prompt.focus();
}

/** Choose the mode in which an answer was asked for. */
function chooseModeOf(answer) {
  document.querySelector(`input[value=${answer.isChat ? "chat" : "text"}]`).checked = true;
  showMode();
}

/** Ask for an answer again, in the place of the turns from it on; a completion is answered below. */
function again(answer) {
  if (running) return;
  edit(null);
  chooseModeOf(answer);
  send(answer.asked, answer.isChat ? answer : null, answer.images);
}

/** Offer each ended answer's actions: in a chat a turn can be edited, and the last answer made again. */
function offerActions() {
  const last = answers.at(-1);
  for (const answer of answers.filter((one) => !one.isRunning)) {
    const actions = answer.isChat ? [["Edit prompt", (one) => !running && edit(one)]] : [];
    if (answer === last || !answer.isChat) actions.unshift(["Regenerate", again]);
    answer.offer(actions);
  }
}

function requestOf(text, replaced, images) {
  const shared = {
    model: byId("model").value,
    stream: true,
    stream_options: { include_usage: true },
    include_drafts: true,
    ...samplingFields(mode()),
  };
  if (mode() === "text") return ["/v1/completions", { ...shared, prompt: text }];
  const system = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
  const asked = { role: "user", content: withImages(text, images) };
  return ["/v1/chat/completions", { ...shared, messages: [...system, ...history(replaced), asked] }];
}

function begin(text, images) {
  const isChat = mode() === "chat";
  byId("welcome").hidden = true;
  const answer = new Answer(text, isChat, (one, round, span) => show(one, round, span));
  answer.images = isChat ? images : [];
  answer.format(byId("formatted").checked);
  if (isChat) {
    const said = document.createElement("p");
    said.className = "said";
    said.textContent = text;
    answer.turn.prepend(...shown(images), said);
  }
  answer.turn.addEventListener("click", () => select(answer));
  answer.turn.addEventListener("focusin", () => panel.answer !== answer && select(answer));
  answer.turn.setAttribute("aria-label", `Answer ${answers.length + 1}`);
  answers.push(answer);
  transcript.append(answer.turn);
  transcript.scrollTop = transcript.scrollHeight;
  select(answer);
  return answer;
}

/** Change the transcript and show its end, unless the reader has scrolled away from it. */
function keepEnd(change) {
  const isAtEnd = transcript.scrollTop + transcript.clientHeight >= transcript.scrollHeight - 60;
  change();
  if (isAtEnd) transcript.scrollTop = transcript.scrollHeight;
}

/** Send a prompt; the answer replaces the chat's turns from `replaced` on, if it is given. */
async function send(text, replaced = null, images = tray.images) {
  const controller = new AbortController();
  setRunning(controller);
  // The server may have been starting when the page was loaded.
  const isReady = byId("model").value !== "" || (await start(controller.signal));
  const asked = isReady ? ask(text, replaced, images) : null;
  if (asked && replaced) dropFrom(replaced);
  if (asked) await follow(text, images, asked, controller.signal);
  else putBack(text, images);
  setRunning(null);
}

/** Return the request for a prompt; if a field is wrong, show the error and return null. */
function ask(text, replaced, images) {
  try {
    return requestOf(text, replaced, images);
  } catch (error) {
    showError(error);
    return null;
  }
}

async function follow(text, images, [path, body], signal) {
  showError(null);
  say("Answering…");
  const answer = begin(text, images);
  // Another text in the box is not the one that was sent.
  if (prompt.value.trim() === text.trim()) prompt.value = "";
  if (tray.images === images) tray.put([]);
  try {
    for await (const chunk of stream(path, body, signal)) {
      answer.usage = chunk.usage ?? answer.usage;
      if (chunk.choices.length) keepEnd(() => answer.add(chunk.choices[0]));
      panel.refresh();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finishReason = "stopped";
    else fail(answer, error);
  }
  // A chat template may refuse an answer that is empty, or two prompts in a row.
  const isGood = !answer.error && answer.content !== "";
  if (!isGood) putBack(text, images);
  answer.isLeftOut = answer.isChat && !isGood;
  keepEnd(() => {
    answer.end();
    offerActions();
  });
  panel.draw();
  if (!answer.error) say(`${answer.finishReason === "stopped" ? "Stopped" : "Done"}: ${answer.summary()}`);
}

/** Put a prompt that has no answer back into its box, unless the user has typed another one. */
function putBack(text, images) {
  if (prompt.value) return;
  prompt.value = text;
  tray.put(images);
}

function fail(answer, error) {
  const isKnown = error instanceof ServiceError;
  answer.error = isKnown ? error.message : "The page could not read the answer; see the browser’s console for details.";
  if (!isKnown) console.error(error);
  if (answer.rounds.numTokens === 0) {
    answers = answers.filter((one) => one !== answer);
    answer.turn.remove();
    byId("welcome").hidden = answers.length > 0;
    select(answers.at(-1) ?? null);
  }
  say("");
  showError(isKnown ? error : new ServiceError(answer.error));
}

function begins() {
  answers = [];
  tray.put([]);
  edit(null);
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
  prompt.placeholder = isChat ? "Ask anything" : "Text to complete";
  for (const one of document.querySelectorAll(".chat-only")) one.hidden = !isChat;
  for (const one of document.querySelectorAll(".text-only")) one.hidden = isChat;
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

/** List the models and return whether that worked; the chosen model stays chosen if it is listed. */
async function start(signal) {
  let models;
  try {
    models = await listModels(signal);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
    return false;
  }
  const chosen = byId("model").value;
  byId("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (models.some((model) => model.id === chosen)) byId("model").value = chosen;
  tray.allow(models[0].max_images ?? 0);
  byId("key-form").hidden = true;
  showError(null);
  byId("shipped").hidden = models[0].root !== SHIPPED;
  if (models[0].root === SHIPPED && !isModeSettled) document.querySelector("input[value=text]").checked = true;
  isModeSettled = true;
  showMode();
  prompt.focus();
  return true;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running || !prompt.value.trim()) return;
  const replaced = edited;
  edit(null);
  send(prompt.value, replaced);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || isComposing(event)) return;
  if (isCardOpen()) hideCard();
  else if (running) running.abort();
  else edit(null);
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});
byId("new").addEventListener("click", begins);
byId("cancel").addEventListener("click", () => {
  edit(null);
  prompt.focus();
});
byId("formatted").addEventListener("change", (event) => {
  for (const answer of answers) answer.format(event.target.checked);
});
byId("colours").addEventListener("change", (event) => document.body.classList.toggle("coloured", event.target.checked));
for (const choice of document.querySelectorAll("input[name=mode]")) {
  choice.addEventListener("change", () => {
    isModeSettled = true;
    edit(null);
    showMode();
  });
}
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  try {
    setKey(byId("key").value);
  } catch (error) {
    showError(error);
    byId("key").focus();
    return;
  }
  // Clear the field, so that no browser offers to store the key.
  byId("key").value = "";
  start();
});
transcript.addEventListener("scroll", hideCard);
tray.listen(document.querySelector("main"));

document.body.classList.add("coloured");
showMode();
panel.draw();
start();
