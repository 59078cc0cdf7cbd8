// Examples that need no file: pictures drawn and sounds made here.

const RATE = 16_000;

function draw(width, height, paint) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, width, height);
  paint(pen);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function circle(pen, colour, x, y, size) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.arc(x + size / 2, y + size / 2, size / 2, 0, 2 * Math.PI);
  pen.fill();
}

function square(pen, colour, x, y, size) {
  pen.fillStyle = colour;
  pen.fillRect(x, y, size, size);
}

function polygon(pen, colour, points) {
  pen.fillStyle = colour;
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.fill();
}

function triangle(pen, colour, x, y, size) {
  polygon(pen, colour, [[x + size / 2, y], [x + size, y + size], [x, y + size]]);
}

function star(pen, colour, x, y, size) {
  polygon(pen, colour, Array.from({ length: 10 }, (_, index) => {
    const radius = (size / 2) * (index % 2 ? 0.42 : 1);
    const angle = (index * Math.PI) / 5 - Math.PI / 2;
    return [x + size / 2 + radius * Math.cos(angle), y + size / 2 + radius * Math.sin(angle)];
  }));
}

const twoShapes = () => draw(168, 84, (pen) => {
  circle(pen, "#ff0000", 12, 12, 60);
  square(pen, "#0000ff", 96, 12, 60);
});

const fourShapes = () => draw(168, 112, (pen) => {
  circle(pen, "#008000", 8, 6, 44);
  star(pen, "#800080", 120, 6, 46);
  triangle(pen, "#ffa500", 62, 60, 44);
  square(pen, "#0000ff", 6, 62, 44);
});

/** `number` short beeps as a 16-bit WAV file. */
function beeps(number) {
  const [on, off] = [0.15 * RATE, 0.15 * RATE];
  const sound = new Int16Array(number * (on + off));
  for (let beep = 0; beep < number; beep += 1) {
    for (let at = 0; at < on; at += 1) {
      const fade = Math.min(1, at / 160, (on - at) / 160);
      sound[beep * (on + off) + at] = 22_000 * fade * Math.sin((2 * Math.PI * 900 * at) / RATE);
    }
  }
  return new Blob([wavHeader(sound.byteLength), sound], { type: "audio/wav" });
}

/** Of 16-bit samples at 16 kHz, `size` bytes of them. */
export function wavHeader(size) {
  const header = new DataView(new ArrayBuffer(44));
  const text = (at, letters) => [...letters].forEach((c, i) => header.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF");
  header.setUint32(4, 36 + size, true);
  text(8, "WAVEfmt ");
  header.setUint32(16, 16, true);
  header.setUint16(20, 1, true);
  header.setUint16(22, 1, true);
  header.setUint32(24, RATE, true);
  header.setUint32(28, RATE * 2, true);
  header.setUint16(32, 2, true);
  header.setUint16(34, 16, true);
  text(36, "data");
  header.setUint32(40, size, true);
  return header;
}

export const SAMPLES = [
  { title: "Two shapes", question: "What is in the picture?", name: "two-shapes.png", make: twoShapes },
  { title: "A few shapes", question: "How many shapes are there?", name: "shapes.png", make: fourShapes },
  { title: "Beeps", question: "How many beeps do you hear?", name: "beeps.wav", make: async () => beeps(3) },
];

/** The sample as the file a person might have dropped. */
export async function sampleFile(sample) {
  const blob = await sample.make();
  return new File([blob], sample.name, { type: blob.type });
}
