// Live captions: the microphone's sound goes to /v1/realtime, and each turn is shown as it is heard.

import { byId, element, icon } from "./dom.js";

const RATE = 24000;
const SUBPROTOCOL = "realtime";
const KEY_SUBPROTOCOL = "openai-insecure-api-key.";
const MAX_WAITING = 1_000_000; // bytes that the server has not taken yet: 15 s of sound
const MAX_TURNS = 200; // what is older goes
const TRANSCRIPTION = "conversation.item.input_audio_transcription";

export class Captions {
  /** `key()` is the API key, or empty. */
  constructor(key) {
    this.key = key;
    this.panel = byId("captions");
    this.lines = byId("caption-lines");
    this.note = byId("captions-note");
    this.button = byId("listen");
    this.turns = new Map(); // item id → its line
    this.listening = null;
    this.button.addEventListener("click", () => (this.listening ? this.stop() : this.start()));
    byId("close-captions").addEventListener("click", () => {
      this.stop();
      this.panel.hidden = true;
    });
  }

  async start() {
    const listening = { stopped: false };
    this.#show(listening);
    this.#say("Waiting for the microphone");
    try {
      await this.#listen(listening);
    } catch (error) {
      this.#end(listening, problemOf(error));
    }
  }

  stop() {
    this.#end(this.listening, "Stopped.", { problem: false });
  }

  async #listen(listening) {
    const devices = navigator.mediaDevices;
    if (!devices) throw new Error("This browser gives a microphone only to pages served from this computer or by https.");
    listening.sound = await devices.getUserMedia({ audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true } });
    if (listening.stopped) return release(listening);
    listening.context = new AudioContext({ sampleRate: RATE });
    await listening.context.audioWorklet.addModule("page/microphone.js");
    if (listening.stopped) return release(listening);
    listening.socket = this.#connect(listening);
    const microphone = new AudioWorkletNode(listening.context, "microphone", { numberOfOutputs: 0 });
    microphone.port.onmessage = ({ data }) => this.#send(listening, data);
    listening.context.createMediaStreamSource(listening.sound).connect(microphone);
  }

  #connect(listening) {
    const address = new URL("v1/realtime?intent=transcription", document.baseURI);
    address.protocol = address.protocol.replace("http", "ws");
    const key = this.key();
    const socket = new WebSocket(address, [SUBPROTOCOL, ...(key ? [KEY_SUBPROTOCOL + key] : [])]);
    socket.onmessage = ({ data }) => this.#take(listening, JSON.parse(data));
    socket.onclose = ({ reason }) => this.#end(listening, reason || "The connection was closed. Is an API key needed?");
    return socket;
  }

  #send(listening, samples) {
    const { socket } = listening;
    if (socket.readyState !== WebSocket.OPEN) return;
    if (socket.bufferedAmount > MAX_WAITING) {
      this.#end(listening, "The server cannot follow: it has not taken the last seconds of sound.");
      return;
    }
    socket.send(JSON.stringify({ type: "input_audio_buffer.append", audio: base64(new Uint8Array(samples)) }));
  }

  #take(listening, event) {
    switch (event.type) {
      case "session.created":
        this.#say("Listening");
        break;
      case "input_audio_buffer.speech_started":
        this.#line(event.item_id);
        break;
      case `${TRANSCRIPTION}.delta`:
        this.#line(event.item_id).append(event.delta);
        break;
      case `${TRANSCRIPTION}.completed`:
        this.#finish(event.item_id, event.transcript);
        break;
      case `${TRANSCRIPTION}.failed`:
        this.#finish(event.item_id, `[${event.error.message}]`);
        break;
      case "error":
        this.#say(event.error.message, { problem: true });
        break;
    }
  }

  #line(id) {
    if (!this.turns.has(id)) {
      const line = element("p", { class: "caption heard", "data-turn": id });
      this.turns.set(id, line);
      this.lines.append(line);
      if (this.turns.size > MAX_TURNS) this.#forget(this.turns.keys().next().value);
      this.lines.scrollTop = this.lines.scrollHeight;
    }
    return this.turns.get(id);
  }

  #finish(id, text) {
    const line = this.#line(id);
    line.textContent = text;
    line.classList.remove("heard");
    if (!text.trim()) this.#forget(id);
    this.lines.scrollTop = this.lines.scrollHeight;
  }

  #forget(id) {
    this.turns.get(id).remove();
    this.turns.delete(id);
  }

  #show(listening) {
    this.listening = listening;
    this.panel.hidden = false;
    const name = listening ? "Stop live captions" : "Live captions";
    this.button.setAttribute("aria-label", name);
    this.button.setAttribute("aria-pressed", String(Boolean(listening)));
    this.button.replaceChildren(icon(listening ? "stop" : "listen"));
  }

  #say(text, { problem = false } = {}) {
    this.note.textContent = text;
    this.note.classList.toggle("problem", problem);
  }

  #end(listening, text, { problem = true } = {}) {
    if (!listening || listening.stopped) return;
    release(listening);
    for (const line of this.turns.values()) line.classList.remove("heard");
    this.#show(null);
    this.#say(text, { problem });
  }
}

function release(listening) {
  listening.stopped = true;
  listening.sound?.getTracks().forEach((track) => track.stop());
  listening.context?.close();
  listening.socket?.close();
}

function problemOf(error) {
  if (error.name === "NotAllowedError") return "The microphone was not allowed.";
  if (error.name === "NotFoundError") return "There is no microphone.";
  return error.message;
}

function base64(bytes) {
  return btoa(String.fromCharCode(...bytes));
}
