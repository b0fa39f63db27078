// Reduces a PNG of a browser to a palette of 256 colours, which takes a third of the bytes.

import { crc32, deflateSync, inflateSync } from "node:zlib";

const SIGNATURE = Buffer.from("89504e470d0a1a0a", "hex");

function chunks(png) {
  const found = [];
  for (let at = SIGNATURE.length; at < png.length;) {
    const length = png.readUInt32BE(at);
    found.push({ type: png.toString("latin1", at + 4, at + 8), data: png.subarray(at + 8, at + 8 + length) });
    at += 12 + length;
  }
  return found;
}

function chunk(type, data) {
  const body = Buffer.concat([Buffer.from(type, "latin1"), data]);
  const [length, sum] = [Buffer.alloc(4), Buffer.alloc(4)];
  length.writeUInt32BE(data.length);
  sum.writeUInt32BE(crc32(body));
  return Buffer.concat([length, body, sum]);
}

/** The prediction of filter 4. */
function paeth(left, up, corner) {
  const [a, b, c] = [Math.abs(up - corner), Math.abs(left - corner), Math.abs(left + up - 2 * corner)];
  return a <= b && a <= c ? left : b <= c ? up : corner;
}

/** The colour of each pixel as 0xRRGGBB. */
function decode(png) {
  const parts = chunks(png);
  const { data: head } = parts.find(({ type }) => type === "IHDR");
  const [width, height, depth, kind, interlaced] = [head.readUInt32BE(0), head.readUInt32BE(4), head[8], head[9], head[12]];
  const size = { 2: 3, 6: 4 }[kind];
  if (depth !== 8 || size === undefined || interlaced !== 0) throw new Error(`a PNG of depth ${depth} and kind ${kind} is not read`);
  const raw = inflateSync(Buffer.concat(parts.filter(({ type }) => type === "IDAT").map(({ data }) => data)));
  const row = width * size;
  const bytes = Buffer.alloc(row * height);
  for (let y = 0; y < height; y += 1) {
    const filter = raw[y * (row + 1)];
    for (let x = 0; x < row; x += 1) {
      const at = y * row + x;
      const left = x >= size ? bytes[at - size] : 0;
      const up = y > 0 ? bytes[at - row] : 0;
      const corner = x >= size && y > 0 ? bytes[at - row - size] : 0;
      const predicted = [0, left, up, (left + up) >> 1, filter === 4 ? paeth(left, up, corner) : 0][filter];
      bytes[at] = raw[y * (row + 1) + 1 + x] + predicted;
    }
  }
  const colours = new Uint32Array(width * height);
  for (let pixel = 0; pixel < colours.length; pixel += 1) colours[pixel] = bytes.readUIntBE(pixel * size, 3);
  return { width, height, colours };
}

const distance = (one, other) => [16, 8, 0].reduce((sum, shift) => sum + (((one >> shift) & 255) - ((other >> shift) & 255)) ** 2, 0);

/** The PNG with the 256 most frequent of its colours; each other pixel takes the nearest of them. */
export function paletted(png) {
  const { width, height, colours } = decode(png);
  const counts = new Map();
  for (const colour of colours) counts.set(colour, (counts.get(colour) ?? 0) + 1);
  const palette = [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, 256).map(([colour]) => colour);
  const index = new Map([...counts.keys()].map((colour) => {
    const nearest = palette.reduce((best, each, place) => (distance(each, colour) < distance(palette[best], colour) ? place : best), 0);
    return [colour, nearest];
  }));
  const rows = Buffer.alloc((width + 1) * height);
  colours.forEach((colour, pixel) => { rows[pixel + Math.floor(pixel / width) + 1] = index.get(colour); });
  const head = Buffer.alloc(13);
  head.writeUInt32BE(width, 0);
  head.writeUInt32BE(height, 4);
  head.set([8, 3, 0, 0, 0], 8);
  const listed = Buffer.from(palette.flatMap((colour) => [colour >> 16, (colour >> 8) & 255, colour & 255]));
  return Buffer.concat([SIGNATURE, chunk("IHDR", head), chunk("PLTE", listed), chunk("IDAT", deflateSync(rows, { level: 9 })), chunk("IEND", Buffer.alloc(0))]);
}
