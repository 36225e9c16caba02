// Blocks of data: base64 of gzip of a JSON header and arrays, little-endian as all browsers' machines are.

const ARRAY_TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const characters = atob(base64);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

function decompressed(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function parsedBlock(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = {};
  for (const [name, [type, offset, count]] of Object.entries(header.arrays)) {
    arrays[name] = new ARRAY_TYPES[type](buffer, 4 + length + offset, count);
  }
  return { header, arrays };
}

async function openBlock(number) {
  const base64 = document.getElementById(`block-${number}`).textContent;
  return parsedBlock(await decompressed(bytesOf(base64)));
}
