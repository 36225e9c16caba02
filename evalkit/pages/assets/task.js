// An opened task: verdicts, scores and texts of its documents by their place in the block.

const ABSENT = 0;
const RIGHT = 1;
const WRONG = 2;
const NO_PREDICTION = 255;

class Task {
  constructor(entry, block) {
    this.entry = entry;
    this.header = block.header;
    this.arrays = block.arrays;
    this.ids = block.header.ids;
    this.choices = entry.kind === "choices";
    this.rows = this.choices ? firstRows(block.arrays.choices) : null;
    this.truncated = new Map(entry.runs.map((run) => [run, this.truncatedTokens(run)]));
    this.searched = [];
  }

  subtask(place) {
    return this.entry.subtasks[this.arrays.subtask[place]] ?? this.entry.task;
  }

  address(place) {
    const subtask = this.subtask(place);
    const parts = [this.entry.task, ...(subtask === this.entry.task ? [] : [subtask]), String(this.ids[place])];
    return "#" + parts.map(encodeURIComponent).join("/");
  }

  find(subtask, id) {
    return this.ids.findIndex((own, place) => String(own) === id && this.subtask(place) === subtask);
  }

  // Arrays of a run's decisions under a rule; undefined where the run has none
  decisions(run, rule) {
    const of = (name) => this.arrays[`${run}/${rule}/${name}`];
    return { prediction: of("prediction"), tie: of("tie"), margin: of("margin"), score: this.arrays[`${run}/score`] };
  }

  verdict(decisions, place) {
    if (!this.choices) return scoreVerdict(decisions.score, place);
    const prediction = decisions.prediction ? decisions.prediction[place] : NO_PREDICTION;
    if (prediction === NO_PREDICTION) return ABSENT;
    return prediction === this.arrays.gold[place] ? RIGHT : WRONG;
  }

  number(decisions, place) {
    const array = this.choices ? decisions.margin : decisions.score;
    return array ? array[place] : NaN;
  }

  rulesOf(run) {
    const suffix = "/prediction";
    const names = Object.keys(this.arrays).filter((name) => name.startsWith(`${run}/`) && name.endsWith(suffix));
    return names.map((name) => name.slice(`${run}/`.length, -suffix.length));
  }

  // Document → the most tokens that a choice of it lost
  truncatedTokens(run) {
    const byRow = this.arrays[`${run}/truncated`];
    if (!this.choices || !byRow) return null;
    const most = new Uint16Array(this.ids.length);
    for (let place = 0; place < most.length; place++) {
      for (let row = this.rows[place]; row < this.rows[place + 1]; row++) most[place] = Math.max(most[place], byRow[row]);
    }
    return most;
  }

  beginning(place) {
    const pieces = this.promptPieces(place);
    const context = SEGMENT_NAMES.indexOf("context");
    const piece = pieces.find(([segment, text]) => segment === context && text.trim()) ?? pieces.find(([, text]) => text.trim());
    const text = piece ? piece[1] : this.otherTexts(place).join(" · ");
    return text.trimStart().slice(0, 160).replace(/\s+/g, " ");
  }

  promptPieces(place) {
    const prompts = this.header.prompts ?? [];
    return (this.choices ? prompts[0]?.common[place] : prompts[place]) ?? [];
  }

  otherTexts(place) {
    if (this.choices) return this.header.options?.[place] ?? [];
    const answers = Object.values(this.header.runs).map((run) => run.answers[place] ?? "");
    return [...this.header.references[place], ...answers];
  }

  // All texts of a document in lower case, made when first searched
  text(place) {
    this.searched[place] ??= [...this.allPieces(place), ...this.otherTexts(place)].join("\n").toLowerCase();
    return this.searched[place];
  }

  allPieces(place) {
    const joined = (pieces) => pieces.map(([, text]) => text).join("");
    if (!this.choices) return [joined(this.promptPieces(place))];
    return this.header.prompts.flatMap((prompt) => [
      joined(prompt.common[place] ?? []), ...(prompt.choices[place] ?? []).map(joined),
    ]);
  }
}

function scoreVerdict(scores, place) {
  const score = scores ? scores[place] : NaN;
  return Number.isNaN(score) ? ABSENT : score >= 1 ? RIGHT : WRONG;
}

// Numbers of choices of documents → the row of each document's first choice, and the number of rows
function firstRows(choices) {
  const rows = new Int32Array(choices.length + 1);
  for (let place = 0; place < choices.length; place++) rows[place + 1] = rows[place] + choices[place];
  return rows;
}
