// Selects, fields and counts above the table of documents.

const TYPING_PAUSE = 150;

class Controls {
  constructor(explorer) {
    this.explorer = explorer;
    this.index = explorer.index;
    this.status = element("p", { class: "count", role: "status" });
    this.fields = element("div", { class: "fields" });
    this.legend = element("p", { class: "runs" });
    const tasks = this.index.tasks.map((entry, number) => [String(number), taskLabel(entry)]);
    const all = tasks.length > 1 ? [[ALL_TASKS, "all tasks"]] : [];
    this.task = select([...tasks, ...all], (number) => explorer.selectTask(number));
    this.element = element("div", { class: "controls", role: "search", "aria-label": "Documents" },
      element("div", { class: "fields" }, labelled("Task", this.task)), this.fields, this.legend, this.status);
  }

  progress(sentence) {
    this.status.textContent = `${sentence} …`;
  }

  failed(error) {
    this.status.textContent = `The documents could not be opened: ${error.message}. The file may be incomplete.`;
  }

  offers(rows, rule) {
    return rule === "" || commonRules(rows).includes(rule);
  }

  show(number, rows, rule) {
    this.task.value = number;
    const choices = rows.tasks.some((task) => task.choices);
    this.fields.replaceChildren(
      ...this.subject(rows),
      ...(choices ? this.rule(rows, rule) : []),
      ...(rows.tasks.some((task) => task.bounded) ? rows.runs.map((run) => this.verdict(run, choices)) : []),
      ...(rows.runs.length === 2 ? this.ahead(rows, choices) : []),
      ...(choices ? [this.margin(), this.box("Ties", "ties"), this.box("Truncated", "truncated")] : []),
      this.search(),
      button("Clear filters", () => this.clear()),
    );
    this.legend.replaceChildren(...rows.runs.map((run) =>
      element("span", {}, element("b", {}, runLetter(run)), ` ${this.index.runs[run].name}`)));
  }

  change(name, value) {
    this.explorer.filters[name] = value;
    this.explorer.filter();
  }

  clear() {
    this.explorer.filters = emptyFilters();
    this.show(this.explorer.number, this.explorer.rows, this.explorer.rule);
    this.explorer.filter();
    this.task.focus();
  }

  subject(rows) {
    const names = rows.tasks.length === 1 ? rows.tasks[0].entry.subtasks : [];
    if (names.length < 2) return [];
    const options = [["", `all ${names.length}`], ...names.map((name) => [name, name])];
    return [labelled("Subject", select(options, (name) => this.change("subtask", name)))];
  }

  rule(rows, rule) {
    const own = [...new Set(rows.runs.map((run) => this.index.runs[run].rule))].join(", ");
    const options = [["", `the runs' own (${own})`], ...commonRules(rows).map((name) => [name, name])];
    const made = select(options, (name) => this.explorer.selectRule(name));
    made.value = rule;
    return [labelled("Rule", made)];
  }

  verdict(run, choices) {
    const words = choices ? ["any", "right", "wrong"] : ["any", "score 1", "below 1"];
    const made = select([["", words[0]], [RIGHT, words[1]], [WRONG, words[2]]], (value) => {
      this.explorer.filters.verdicts.set(run, value);
      this.explorer.filter();
    });
    return labelled(runLetter(run), made);
  }

  ahead(rows, choices) {
    const [a, b] = rows.runs.map(runLetter);
    const words = (x, y) => (choices ? `${x} right, ${y} wrong` : `${x} above ${y}`);
    const toggles = [["first", words(a, b)], ["second", words(b, a)]].map(([value, label]) =>
      button(label, () => {
        this.change("ahead", this.explorer.filters.ahead === value ? "" : value);
        for (const one of toggles) one.setAttribute("aria-pressed", String(one.value === this.explorer.filters.ahead));
      }, { value, "aria-pressed": "false" }));
    return [element("span", { class: "toggles" }, ...toggles)];
  }

  margin() {
    const input = element("input", { type: "number", min: "0", step: "any", placeholder: "any",
      oninput: () => this.change("margin", input.value === "" ? NaN : input.valueAsNumber) });
    return labelled("Margin within ±", input);
  }

  box(label, name) {
    const input = element("input", { type: "checkbox", onchange: () => this.change(name, input.checked) });
    return element("label", { class: "box" }, input, label);
  }

  search() {
    let timer = 0;
    const input = element("input", { type: "search", placeholder: "words that all occur in prompt, options or answers", oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.change("text", input.value), TYPING_PAUSE);
    } });
    const field = labelled("Search", input);
    field.classList.add("search");
    return field;
  }

  count(shown, rows) {
    const problems = new Set(rows.tasks.map((task) => task.header.problem).filter(Boolean));
    if (!rows.count && problems.size) {
      this.status.textContent = `No documents: ${[...problems].join("; ")}`;
      return;
    }
    const matching = this.explorer.filters.text ? " match" : " shown";
    const sampled = rows.tasks.filter((task) => task.entry.documents < task.entry.of);
    const of = sampled.reduce((sum, task) => sum + task.entry.of - task.entry.documents, rows.count);
    const sample = sampled.length ? ` (a sample of ${counted(of)})` : "";
    this.status.textContent = `${counted(shown)} of ${counted(rows.count)} documents${matching}${sample}`;
  }
}

function commonRules(rows) {
  const [first, ...others] = rows.tasks.filter((task) => task.choices).map((task) => task.entry.rules);
  return (first ?? []).filter((rule) => others.every((rules) => rules.includes(rule)));
}

function taskLabel(entry) {
  const unofficial = entry.official === false ? ", not official" : "";
  return `${entry.label} (${counted(entry.documents)}${unofficial})`;
}
