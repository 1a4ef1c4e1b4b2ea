// The page's requests to the service that serves it. The key stays in this module's memory.

let key = "";

/** Store the key for later requests; throws if a header cannot carry it. */
export function setKey(value) {
  const text = value.trim();
  if (/[^\t\x20-\x7e\x80-\xff]/.test(text)) {
    const rule = "key must contain only characters that an HTTP header can carry (Latin-1), got others";
    throw new ServiceError(`${rule}; copy the server’s key again`, 0, "key");
  }
  key = text;
}

/** An error answer: the server's own text, the field to blame, and the status (0: no answer came). */
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

/** Call the service. `path` begins with a slash; the prefix that this file was loaded from goes before it. */
async function call(path, options) {
  let response;
  try {
    response = await fetch(new URL(`..${path}`, import.meta.url), { ...options, headers: headers(), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError("The server is not responding. Is it still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const said = body?.error;
  throw new ServiceError(said?.message ?? `The server returned status ${response.status}.`, response.status, said?.param ?? null);
}

export async function listModels(signal) {
  const response = await call("/v1/models", { method: "GET", signal });
  return (await response.json()).data;
}

/** Yield the chunks of a stream; throws the error that it ends with. A reader that leaves early ends the request. */
export async function* stream(path, body, signal) {
  const response = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let isWhole = false;
  try {
    for await (const data of events(reader)) {
      isWhole = data === "[DONE]";
      if (isWhole) return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServiceError(chunk.error.message, 500, chunk.error.param);
      yield chunk;
    }
  } finally {
    // Cancelling fails if the connection was lost.
    if (!isWhole) reader.cancel().catch(() => {});
  }
}

/** Yield the data of each event of a stream. */
async function* events(reader) {
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
    const complete = text.split("\n\n");
    text = complete.pop();
    for (const event of complete) if (event.startsWith("data: ")) yield event.slice(6);
  }
}
