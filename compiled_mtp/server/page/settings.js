// The form's fields as fields of a request. An empty field leaves the default of the server or the checkpoint.

import { ServiceError } from "./api.js";

const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
];
// Fields of the API whose element on the page has another id.
const IDS = { stop: "stop_strings", chat_template_kwargs: "enable_thinking", messages: "prompt" };
const byId = (id) => document.getElementById(id);

const DECIMAL = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/** Return a decimal number, or other text unchanged: the server's error then says what is wrong. */
function numberOf(name, text) {
  const value = Number(text);
  if (!DECIMAL.test(text) || !Number.isFinite(value)) return text;
  if (Number.isInteger(value) && !Number.isSafeInteger(value)) {
    const most = Number.MAX_SAFE_INTEGER;
    const rule = `${name} must be from -${most} to ${most} on this page, got ${text}`;
    throw new ServiceError(`${rule}; browsers round larger integers, so send it through the API`, 0, name);
  }
  return value;
}

/** Return the sampling fields that are filled in; throws for an integer that the browser would round. */
export function samplingFields(mode) {
  const fields = {};
  for (const name of NUMBERS) {
    const text = byId(name).value.trim();
    if (text !== "") fields[name] = numberOf(name, text);
  }
  const stops = byId("stop_strings").value.split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops;
  const thinking = byId("enable_thinking").value;
  if (mode === "chat" && thinking) fields.chat_template_kwargs = { enable_thinking: thinking === "true" };
  return fields;
}

export function systemPrompt() {
  return byId("system").value.trim();
}

/** Mark the field to blame, and show it. */
export function blame(param) {
  forgive();
  const name = param?.split(".")[0];
  const field = name && byId(IDS[name] ?? name);
  if (!field || !field.closest("form")) return;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-errormessage", "error");
  if (field.closest("details")) field.closest("details").open = true;
}

export function forgive() {
  for (const field of document.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-errormessage");
  }
}
