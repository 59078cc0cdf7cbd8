// Pictures and films from the camera or the screen, and sounds from the microphone.

import { byId } from "./dom.js";
import { wavHeader } from "./samples.js";

const RATE = 16_000;
const SOURCES = {
  camera: { title: "Camera", open: (devices) => devices.getUserMedia({ video: true }) },
  screen: { title: "Screen", open: (devices) => devices.getDisplayMedia({ video: true }) },
  sound: { title: "Microphone", open: (devices) => devices.getUserMedia({ audio: { channelCount: 1 } }) },
};
const PROBLEMS = {
  NotAllowedError: "The browser was told not to allow it.",
  NotFoundError: "There is no such device.",
  NotReadableError: "Another program uses the device.",
};

export class Capture {
  /** `onFile(file)` gets what was taken; `takesFilms()` says whether the model does. */
  constructor({ onFile, takesFilms }) {
    this.onFile = onFile;
    this.takesFilms = takesFilms;
    this.dialog = byId("capture");
    this.view = byId("capture-view");
    this.note = byId("capture-note");
    this.take = byId("capture-take");
    this.record = byId("capture-record");
    this.opened = null; // what is open: its stream, and what records it
    this.take.addEventListener("click", () => this.#takePicture());
    this.record.addEventListener("click", () => this.#toggleRecording());
    byId("capture-cancel").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.#release());
  }

  async open(source) {
    const opened = (this.opened = { source, stream: null, recording: null });
    byId("capture-title").textContent = SOURCES[source].title;
    this.#say("Waiting for the browser to allow it");
    this.view.hidden = this.take.hidden = this.record.hidden = true;
    this.dialog.showModal();
    try {
      const devices = navigator.mediaDevices;
      if (!devices) throw new Error("Browsers allow this only to pages served from this computer or by https.");
      opened.stream = await SOURCES[source].open(devices);
    } catch (error) {
      this.#say(PROBLEMS[error.name] ?? error.message, { problem: true });
      return;
    }
    if (this.opened !== opened) stop(opened.stream);
    else await this.#show(opened);
  }

  async #show(opened) {
    const seen = opened.source !== "sound";
    if (seen) {
      this.view.srcObject = opened.stream;
      await this.view.play().catch(() => null); // closed before a picture came
      if (this.opened !== opened) return;
    }
    this.#say(seen ? "" : "Ready to record");
    this.view.hidden = this.take.hidden = !seen;
    this.record.hidden = seen && !(this.takesFilms() && globalThis.MediaRecorder);
    this.record.textContent = seen ? "Record film" : "Record";
    (seen ? this.take : this.record).focus();
  }

  async #takePicture() {
    const name = `${this.opened.source}.png`;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [this.view.videoWidth, this.view.videoHeight];
    canvas.getContext("2d").drawImage(this.view, 0, 0);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    this.#give(blob, name);
  }

  async #toggleRecording() {
    const { opened } = this;
    if (opened.recording) {
      const { blob, name } = await opened.recording.finish();
      this.#give(blob, name);
      return;
    }
    this.record.disabled = true;
    opened.recording = await (opened.source === "sound" ? recordSound : recordFilm)(opened.stream);
    this.record.disabled = false;
    this.record.textContent = "Stop and attach";
    this.take.hidden = true;
    this.#say("Recording");
  }

  #give(blob, name) {
    this.dialog.close();
    this.onFile(new File([blob], name, { type: blob.type }));
  }

  #release() {
    const { opened } = this;
    this.opened = null;
    opened?.recording?.cancel();
    stop(opened?.stream);
    this.view.srcObject = null;
  }

  #say(text, { problem = false } = {}) {
    this.note.textContent = text;
    this.note.classList.toggle("problem", problem);
  }
}

function stop(stream) {
  stream?.getTracks().forEach((track) => track.stop());
}

/** As a WAV file: what browsers record by themselves is a form that few servers hear. */
async function recordSound(stream) {
  const context = new AudioContext({ sampleRate: RATE });
  await context.audioWorklet.addModule("page/microphone.js");
  const pieces = [];
  const microphone = new AudioWorkletNode(context, "microphone", { numberOfOutputs: 0 });
  microphone.port.onmessage = ({ data }) => pieces.push(data);
  context.createMediaStreamSource(stream).connect(microphone);
  return {
    cancel: () => context.state !== "closed" && context.close(),
    finish: async () => {
      await context.close();
      const size = pieces.reduce((total, piece) => total + piece.byteLength, 0);
      return { blob: new Blob([wavHeader(size), ...pieces], { type: "audio/wav" }), name: "recording.wav" };
    },
  };
}

async function recordFilm(stream) {
  const recorder = new MediaRecorder(stream);
  const pieces = [];
  recorder.ondataavailable = ({ data }) => pieces.push(data);
  recorder.start();
  return {
    cancel: () => recorder.state !== "inactive" && recorder.stop(),
    finish: () => new Promise((resolve) => {
      recorder.onstop = () => {
        const type = recorder.mimeType.split(";")[0] || "video/webm";
        resolve({ blob: new Blob(pieces, { type }), name: `recording.${type.split("/")[1]}` });
      };
      recorder.stop();
    }),
  };
}
