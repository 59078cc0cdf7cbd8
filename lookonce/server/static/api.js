// The public routes this page uses. Addresses are relative, so a proxy may add a path before them.

export class ApiError extends Error {
  /** `code` and `param` are those of the server's error, where it names them. */
  constructor(message, status, { code = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** What every request carries; `key` may be empty. */
function headers(key) {
  const sent = { "Content-Type": "application/json" };
  if (key) sent.Authorization = `Bearer ${key}`;
  return sent;
}

async function refused(response) {
  const message = `the server answered ${response.status}`;
  try {
    const { error } = await response.json();
    return new ApiError(error.message ?? message, response.status, error);
  } catch {
    // Not our server's words (a proxy's page, say): the status must do.
    return new ApiError(message, response.status);
  }
}

export async function models(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  if (!response.ok) throw await refused(response);
  return (await response.json()).data;
}

/** What is said in a sound: `{text, words}`, without words where the model gives no times. */
export async function transcribe(file, key) {
  const timed = await sendSound(file, key, { response_format: "verbose_json", "timestamp_granularities[]": "word" });
  const answer = timed.status === 400 ? await sendSound(file, key, { response_format: "json" }) : timed;
  if (!answer.ok) throw await refused(answer);
  return answer.json();
}

function sendSound(file, key, fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  form.append("file", file, file.name || "sound");
  const sent = key ? { Authorization: `Bearer ${key}` } : {};
  return fetch("v1/audio/transcriptions", { method: "POST", headers: sent, body: form });
}

/** "ready", "starting", "draining", "stuck", "dead". */
export async function state() {
  return (await (await fetch("ready")).json()).status;
}

/** What reuse saved today: `{day, saved}`. */
export async function savings(key) {
  const response = await fetch("savings", { headers: headers(key) });
  if (!response.ok) throw await refused(response);
  return response.json();
}

export async function metrics() {
  const response = await fetch("metrics");
  if (!response.ok) throw await refused(response);
  return response.text();
}

/** The chunks of one streamed chat completion, as they come. */
export async function* chat(body, { key, signal }) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await refused(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 500);
    yield chunk;
  }
  throw new ApiError("the connection was lost before the answer ended", 0);
}

/** The `data:` of each server-sent event in a stream of bytes. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
