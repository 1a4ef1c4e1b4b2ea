// What the page asks of the service that serves it. The key stays in this module's memory.

let key = "";

export function setKey(value) {
  key = value.trim();
}

/** An answer that is an error: the server's own text, the field to blame, and its status (0: no answer). */
export class ServiceError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

function headers() {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError("The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const said = body?.error;
  throw new ServiceError(said?.message ?? `The server answered ${response.status}.`, response.status, said?.param ?? null);
}

export async function listModels() {
  const response = await call("/v1/models", { method: "GET" });
  return (await response.json()).data;
}

/** Yield the chunks of a stream; an error among them is thrown. */
export async function* stream(path, body, signal) {
  const response = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServiceError("The connection to the server was lost.");
    }
    if (part.done) throw new ServiceError("The answer ended before it was complete.");
    text += part.value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServiceError(chunk.error.message, 500, chunk.error.param);
      yield chunk;
    }
  }
}
