// An opened task: verdicts, scores and texts of its documents by their place in the block.

const ABSENT = 0;
const RIGHT = 1;
const WRONG = 2;
const NO_PREDICTION = 65535;

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
    this.headings = null;
    this.bounded = this.choices || entry.runs.every((run) => withinBounds(block.arrays[`${run}/score`] ?? []));
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
    if (!this.choices) return this.bounded ? scoreVerdict(decisions.score, place) : ABSENT;
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
    const most = new Int32Array(this.ids.length);
    for (let place = 0; place < most.length; place++) {
      for (let row = this.rows[place]; row < this.rows[place + 1]; row++) most[place] = Math.max(most[place], byRow[row]);
    }
    return most;
  }

  beginning(place) {
    const context = this.context(place).slice(this.heading(this.subtask(place)).length);
    const text = context.trim() ? context : this.otherTexts(place).join(" · ");
    return text.trimStart().slice(0, 160).replace(/\s+/g, " ");
  }

  // The paragraphs with which all contexts of a subject begin: MMLU's heading, solved examples
  heading(subtask) {
    this.headings ??= this.sharedHeadings();
    return this.headings.get(subtask);
  }

  sharedHeadings() {
    const contexts = new Map(this.entry.subtasks.map((subtask) => [subtask, []]));
    for (let place = 0; place < this.ids.length; place++) contexts.get(this.subtask(place)).push(this.context(place));
    return new Map(Array.from(contexts, ([subtask, texts]) => [subtask, sharedParagraphs(texts)]));
  }

  // The context of a document; of its first choice where choices have different ones
  context(place) {
    const context = SEGMENT_NAMES.indexOf("context");
    let text = "";
    for (const pieces of this.promptPieces(place)) {
      for (const [segment, words] of pieces) if (segment === context) text += words;
    }
    return text;
  }

  // The pieces of a document's prompt, and those of its first choice
  promptPieces(place) {
    const prompts = this.header.prompts ?? [];
    if (!this.choices) return [prompts[place] ?? []];
    const prompt = prompts.find((one) => one.choices[place].length);
    return prompt ? [prompt.common[place], prompt.choices[place][0]] : [];
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
    if (!this.choices) return this.promptPieces(place).map(joined);
    return this.header.prompts.flatMap((prompt) => [
      joined(prompt.common[place] ?? []), ...(prompt.choices[place] ?? []).map(joined),
    ]);
  }
}

// Scores with other bounds, such as perplexities, are neither right nor wrong
function withinBounds(scores) {
  return scores.every((score) => !(score < 0 || score > 1));
}

function sharedParagraphs(texts) {
  const end = "\n\n";
  let shared = texts.length > 1 ? texts[0].slice(0, texts[0].lastIndexOf(end) + 1) : "";
  for (const text of texts) {
    while (!text.startsWith(shared)) shared = shared.slice(0, shared.lastIndexOf(end, shared.length - 2) + 1);
  }
  return shared;
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
