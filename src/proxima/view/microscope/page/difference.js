// Differences of two answers: the words of one that are not in the other, in order.

const MOST = 3e6; // pairs of words compared; longer middles count as different as a whole

export function wordsOf(text) {
  return text.match(/\s*\S+|\s+$/g) || [];
}

/** Flags, one a word of `words`: true where it is in no longest common subsequence with `base`. */
export function differing(words, base) {
  let first = 0, end = words.length, other = base.length;
  while (first < end && first < other && words[first] === base[first]) first++;
  while (end > first && other > first && words[end - 1] === base[other - 1]) {
    end--;
    other--;
  }
  const flags = new Uint8Array(words.length), rows = end - first, columns = other - first;
  flags.fill(1, first, end);
  if (!rows || !columns || rows * columns > MOST) return { flags, first };
  const wide = columns + 1, common = new Uint16Array((rows + 1) * wide);
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      common[i * wide + j] = words[first + i] === base[first + j] ? common[(i + 1) * wide + j + 1] + 1 : Math.max(common[(i + 1) * wide + j], common[i * wide + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < rows && j < columns; ) {
    if (words[first + i] === base[first + j]) {
      flags[first + i++] = 0;
      j++;
    } else if (common[(i + 1) * wide + j] >= common[i * wide + j + 1]) i++;
    else j++;
  }
  return { flags, first };
}
