// One document, opened: prompt by segment, choices, scores by segment, decisions of every rule; or answers.

const SEGMENT_NAMES = embedded("document-index").segments;

function segmentSpans(pieces) {
  let before = null;
  return pieces.map(([number, text]) => {
    const name = SEGMENT_NAMES[number];
    if (!name) return element("span", {}, text);
    const named = name === before ? [] : [element("small", { class: "segment-name" }, name)];
    before = name;
    return element("span", { class: `segment segment-${name}`, title: name }, ...named, text);
  });
}

function promptBox(pieces) {
  return element("pre", { class: "prompt", tabindex: "0" }, ...segmentSpans(pieces));
}

function runNames(runs, numbers) {
  return numbers.map((run) => `${runLetter(run)} (${runs[run].name})`).join(", ");
}

function dataTable(label, head, body) {
  const row = (cells) => element("tr", {}, ...cells.map((cell, i) => element(i ? "td" : "th", i ? {} : { scope: "row" }, cell)));
  const headings = head.map((text) => element("th", { scope: "col" }, text));
  const table = element("table", { class: "evalkit right" },
    element("thead", {}, element("tr", {}, ...headings)), element("tbody", {}, ...body.map(row)));
  return element("div", { class: "wide", role: "region", tabindex: "0", "aria-label": label }, table);
}

function section(title, ...children) {
  return element("section", {}, element("h4", {}, title), ...children);
}

function promptSections(task, place, runs) {
  const { header, arrays } = task;
  const lacks = header.prompts.length ? "The texts are not exactly what was scored" : "The texts are not in this page";
  const problem = header.problem ? [element("p", { class: "problem" }, `${lacks}: ${header.problem}`)] : [];
  const gold = arrays.gold[place];
  const sections = header.prompts.map((prompt) => {
    const title = header.prompts.length > 1 ? `Prompt of ${runNames(runs, prompt.runs)}` : "Prompt";
    const common = prompt.common[place] ?? [];
    return section(title, ...(common.length ? [promptBox(common)] : []), choiceList(task, place, prompt, gold));
  });
  return [...problem, ...sections];
}

function choiceList(task, place, prompt, gold) {
  const choices = prompt.choices[place] ?? [];
  const items = choices.map((pieces, choice) => {
    const option = task.header.options?.[place]?.[choice] ?? "";
    const words = [`Choice ${choice}`, ...(choice === gold ? [element("strong", {}, " · gold answer")] : [])];
    return element("li", { class: choice === gold ? "choice gold" : "choice" },
      element("p", { class: "choice-title" }, ...words, option ? element("span", { class: "option" }, option) : ""),
      promptBox(pieces));
  });
  return element("ol", { class: "choices" }, ...items);
}

function segmentTable(task, place, run, name) {
  const ll = task.arrays[`${run}/ll`];
  const n = task.arrays[`${run}/n`];
  if (!ll || !n) return [];
  const [first, end] = [task.rows[place], task.rows[place + 1]];
  const width = SEGMENT_NAMES.length;
  const used = SEGMENT_NAMES.map((unused, s) => s).filter((s) => {
    // An imported log has no token counts: -1
    for (let row = first; row < end; row++) {
      const at = row * width + s;
      if (n[at] > 0 || (n[at] < 0 && Number.isFinite(ll[at]))) return true;
    }
    return false;
  });
  const truncated = task.arrays[`${run}/truncated`];
  const body = [];
  for (let row = first; row < end; row++) body.push(...choiceRows(task, row, row - first, place, used, ll, n));
  const title = `Scores of ${runLetter(run)} (${name})`;
  const head = ["Choice", "Segment", "log-likelihood", "tokens", "perplexity"];
  const cut = truncated ? Math.max(...truncated.subarray(first, end)) : 0;
  const words = `Context tokens cut off to fit the window: ${counted(cut)}, of the longest choice.`;
  return [section(title, dataTable(title, head, body), ...(cut ? [element("p", { class: "note" }, words)] : []))];
}

// A row for each segment, and for the whole sequence, whose perplexity the rule ppl compares
function choiceRows(task, row, choice, place, used, ll, n) {
  const at = (segment) => row * SEGMENT_NAMES.length + segment;
  const label = `${choice}${choice === task.arrays.gold[place] ? " (gold)" : ""}`;
  const rows = used.map((s) => [label, SEGMENT_NAMES[s], ...segmentCells(ll[at(s)], n[at(s)])]);
  const scored = used.filter((s) => Number.isFinite(ll[at(s)]));
  if (scored.length > 1) {
    const total = (array) => scored.reduce((sum, s) => sum + array[at(s)], 0);
    rows.push([label, element("strong", {}, "whole"), ...segmentCells(total(ll), total(n))]);
  }
  return rows;
}

function segmentCells(ll, n) {
  return [fixed(ll, 3), n < 0 ? "–" : counted(n), fixed(n > 0 ? Math.exp(-ll / n) : NaN, 2)];
}

function ruleTable(task, place, runs) {
  const rules = [...new Set(task.entry.runs.flatMap((run) => task.rulesOf(run)))];
  const head = ["Rule", ...task.entry.runs.flatMap((run) => [`${runLetter(run)} chooses`, `${runLetter(run)} margin`])];
  const body = rules.map((rule) => [rule, ...task.entry.runs.flatMap((run) => decisionCells(task, place, run, rule, runs))]);
  const note = "A margin is the gold choice's score less the best other's, in the rule's unit. Bold: the run's own rule.";
  return section("What each rule chooses", dataTable("Choices of each rule", head, body), element("p", { class: "note" }, note));
}

function decisionCells(task, place, run, rule, runs) {
  const decisions = task.decisions(run, rule);
  const verdict = task.verdict(decisions, place);
  if (verdict === ABSENT) return ["–", "–"];
  const tie = decisions.tie?.[place] ? ", tie" : "";
  const words = `${decisions.prediction[place]} ${VERDICT_WORDS[verdict]}${tie}`;
  const own = runs[run].rule === rule ? "strong" : "span";
  return [element(own, { class: `verdict-${VERDICT_CLASSES[verdict]}` }, words), signed(decisions.margin?.[place], 3)];
}

function choiceSections(task, place, runs) {
  return [
    ...promptSections(task, place, runs),
    ruleTable(task, place, runs),
    ...task.entry.runs.flatMap((run) => segmentTable(task, place, run, runs[run].name)),
  ];
}

function answerSections(task, place, runs) {
  const { header } = task;
  const prompt = header.prompts[place] ?? [];
  const references = header.references[place];
  const listed = references.map((text) => element("li", {}, element("pre", { class: "answer" }, text)));
  return [
    ...(references.length ? [section(references.length > 1 ? "Right answers" : "Right answer", element("ul", { class: "references" }, ...listed))] : []),
    ...task.entry.runs.map((run) => answerSection(task, place, run, runs[run].name)),
    ...(prompt.length ? [section("Prompt", promptBox(prompt))] : []),
  ];
}

function answerSection(task, place, run, name) {
  const own = task.header.runs[run];
  const answer = own?.answers[place] ?? null;
  const title = `Answer of ${runLetter(run)} (${name})`;
  if (answer === null) return section(title, element("p", {}, "The run has no answer to this document."));
  const score = task.arrays[`${run}/score`]?.[place] ?? NaN;
  const facts = { [task.entry.metric || "score"]: fixed(score, 4), ...own.facts[place] };
  const list = Object.entries(facts).flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, String(value))]);
  return section(title, element("pre", { class: "answer" }, answer), element("dl", {}, ...list));
}

function documentSections(task, place, runs) {
  return task.choices ? choiceSections(task, place, runs) : answerSections(task, place, runs);
}

function documentTitle(task, place) {
  const subtask = task.subtask(place);
  return [task.entry.label, ...(subtask === task.entry.task ? [] : [subtask]), task.ids[place]].join(" / ");
}
