// Runs in the browser's sound thread: collects a tenth of a second of samples as 16-bit PCM.

const CHUNK = Math.round(sampleRate / 10);

class Microphone extends AudioWorkletProcessor {
  constructor() {
    super();
    this.samples = new Int16Array(CHUNK);
    this.length = 0;
  }

  process([[channel]]) {
    for (const sample of channel ?? []) {
      this.samples[this.length] = Math.max(-1, Math.min(1, sample)) * 32767;
      this.length += 1;
      if (this.length === CHUNK) {
        this.port.postMessage(this.samples.slice().buffer);
        this.length = 0;
      }
    }
    return true;
  }
}

registerProcessor("microphone", Microphone);
