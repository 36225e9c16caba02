// The documents of one or all tasks as numbered rows, and which of them the filters let through.

class Rows {
  constructor(tasks) {
    this.tasks = tasks;
    this.runs = [...new Set(tasks.flatMap((task) => task.entry.runs))].sort((a, b) => a - b);
    this.starts = [];
    this.count = 0;
    for (const task of tasks) {
      this.starts.push(this.count);
      this.count += task.ids.length;
    }
    this.taskNumbers = new Uint16Array(this.count);
    tasks.forEach((task, i) => this.taskNumbers.fill(i, this.starts[i], this.starts[i] + task.ids.length));
  }

  // An empty name is each run's own rule
  useRule(index, rule) {
    this.rule = rule;
    const ofRun = (run) => rule || index.runs[run].rule;
    this.decisions = this.tasks.map((task) => new Map(this.runs.map((run) => [run, task.decisions(run, ofRun(run))])));
  }

  task(row) {
    return this.tasks[this.taskNumbers[row]];
  }

  place(row) {
    return row - this.starts[this.taskNumbers[row]];
  }

  verdict(row, run) {
    return this.task(row).verdict(this.decisions[this.taskNumbers[row]].get(run), this.place(row));
  }

  number(row, run) {
    return this.task(row).number(this.decisions[this.taskNumbers[row]].get(run), this.place(row));
  }

  tie(row, run) {
    const tie = this.decisions[this.taskNumbers[row]].get(run).tie;
    return Boolean(tie && tie[this.place(row)]);
  }

  truncated(row, run) {
    const truncated = this.task(row).truncated.get(run);
    return Boolean(truncated && truncated[this.place(row)]);
  }

  // Whether the first of two runs is right and the other wrong; of graded answers, whether its score is higher
  ahead(row, first, second) {
    if (this.task(row).choices) return this.verdict(row, first) === RIGHT && this.verdict(row, second) === WRONG;
    return this.number(row, first) > this.number(row, second);
  }

  row(entry, subtask, id) {
    const number = this.tasks.findIndex((task) => task.entry === entry);
    const place = number < 0 ? -1 : this.tasks[number].find(subtask, id);
    return place < 0 ? -1 : this.starts[number] + place;
  }
}

function emptyFilters() {
  return { subtask: "", verdicts: new Map(), ahead: "", ties: false, truncated: false, margin: NaN, text: "" };
}

// Functions of a row number, the cheapest first: all must hold
function conditions(rows, filters) {
  const { runs } = rows;
  const made = [];
  for (const [run, verdict] of filters.verdicts) {
    if (verdict) made.push((row) => rows.verdict(row, run) === Number(verdict));
  }
  if (filters.subtask) made.push((row) => rows.task(row).subtask(rows.place(row)) === filters.subtask);
  if (filters.ahead) {
    const [first, second] = filters.ahead === "first" ? runs : [...runs].reverse();
    made.push((row) => rows.ahead(row, first, second));
  }
  if (filters.ties) made.push((row) => runs.some((run) => rows.tie(row, run)));
  if (filters.truncated) made.push((row) => runs.some((run) => rows.truncated(row, run)));
  if (!Number.isNaN(filters.margin)) {
    made.push((row) => rows.task(row).choices && runs.some((run) => Math.abs(rows.number(row, run)) <= filters.margin));
  }
  const words = filters.text.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length) {
    made.push((row) => {
      const text = rows.task(row).text(rows.place(row));
      return words.every((word) => text.includes(word));
    });
  }
  return made;
}

// Row number → 1 if it is shown
function shownRows(rows, filters) {
  const all = conditions(rows, filters);
  const shown = new Uint8Array(rows.count);
  for (let row = 0; row < rows.count; row++) shown[row] = all.every((condition) => condition(row)) ? 1 : 0;
  return shown;
}
