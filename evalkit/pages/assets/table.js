// The table of documents: Tabulator's virtual rows, each only a number, whose cells are elements made here.
// Tabulator parses strings as HTML in titles and cells, so it is given none that come from data.

const VERDICT_WORDS = ["–", "✓ right", "✗ wrong"];
const VERDICT_CLASSES = ["absent", "right", "wrong"];
const ROW_HEIGHT = 36;

function runLetter(run) {
  return run < 26 ? String.fromCharCode(65 + run) : `R${run + 1}`;
}

const collated = new Intl.Collator("en", { numeric: true }).compare;

// NaN comes last in both directions
function compareNumbers(a, b, direction) {
  if (Number.isNaN(a) || Number.isNaN(b)) {
    const last = Number(Number.isNaN(a)) - Number(Number.isNaN(b));
    return direction === "asc" ? last : -last;
  }
  return a - b;
}

function heading(title, description) {
  return () => element("button", { type: "button", class: "sort", title: `Sort by ${description}` }, title);
}

// Values of rows, kept while the rule is the same: a sort reads each many times
function kept(rows, value) {
  let [values, rule] = [[], rows.rule];
  return (row) => {
    if (rule !== rows.rule) [values, rule] = [[], rows.rule];
    return (values[row] ??= value(row));
  };
}

function column(field, title, description, cell, value, settings = {}) {
  const compare = (first, second, rowA, rowB, unused, direction) => {
    const [x, y] = [value(first), value(second)];
    return (typeof x === "string" ? collated(x, y) : compareNumbers(x, y, direction)) || first - second;
  };
  return {
    field, title: field, titleFormatter: heading(title, description), formatter: (shown) => cell(shown.getValue()),
    sorter: compare, resizable: false, ...settings,
  };
}

function verdictCell(rows, row, run) {
  const verdict = rows.verdict(row, run);
  const choices = rows.task(row).choices;
  const words = choices ? VERDICT_WORDS[verdict] + (rows.tie(row, run) ? " · tie" : "") : "scored";
  return element("span", { class: `verdict-${choices ? VERDICT_CLASSES[verdict] : "absent"}` }, verdict ? words : "–");
}

function runColumns(rows, run, name) {
  const letter = runLetter(run);
  const numeric = { hozAlign: "right", headerHozAlign: "right", width: 112 };
  const choices = rows.tasks.some((task) => task.choices);
  const score = rows.tasks.every((task) => !task.choices);
  const verdict = column(`verdict-${run}`, letter, `the verdict of ${name}`,
    (row) => verdictCell(rows, row, run), kept(rows, (row) => rows.verdict(row, run)), { width: 128 });
  const number = column(`number-${run}`, score ? `${letter} score` : `${letter} margin`, `the ${score ? "score" : "margin"} of ${name}`,
    (row) => element("span", {}, (score ? fixed : signed)(rows.number(row, run), 3)), kept(rows, (row) => rows.number(row, run)), numeric);
  return choices ? [verdict, number] : [number];
}

function documentColumns(rows) {
  const id = (row) => rows.task(row).ids[rows.place(row)];
  const columns = [
    column("document", "Document", "the document",
      (row) => element("a", { href: rows.task(row).address(rows.place(row)), tabindex: "-1" }, String(id(row))),
      kept(rows, (row) => String(id(row))), { width: 124 }),
  ];
  if (rows.tasks.length > 1) {
    const task = (row) => rows.task(row).entry.label;
    columns.unshift(column("task", "Task", "the task", (row) => element("span", {}, task(row)), task, { width: 124 }));
  }
  if (rows.tasks.some((task) => task.entry.subtasks.length > 1)) {
    const subject = (row) => rows.task(row).subtask(rows.place(row));
    columns.push(column("subject", "Subject", "the subject", (row) => element("span", {}, subject(row)), subject, { width: 170 }));
  }
  const text = (row) => rows.task(row).beginning(rows.place(row));
  columns.push(column("text", "Text", "the text", (row) => element("span", {}, text(row)),
    kept(rows, (row) => text(row).slice(0, 60)), { minWidth: 220, widthGrow: 1 }));
  return columns;
}

// Objects for Tabulator, with the row's number in every field: reading data through its components is slow
function numberedRows(count, fields) {
  return Array.from({ length: count }, (unused, row) => {
    const made = { row };
    for (const field of fields) made[field] = row;
    return made;
  });
}

// Resolve to the table once it is built, and the rows that it has made elements of
function buildTable(holder, rows, runs) {
  const columns = [...documentColumns(rows), ...rows.runs.flatMap((run) => runColumns(rows, run, runs[run].name))];
  const made = new Set();
  const table = new Tabulator(holder, {
    data: numberedRows(rows.count, columns.map((one) => one.field)),
    index: "row",
    columns,
    height: "27rem",
    rowHeight: ROW_HEIGHT,
    layout: "fitColumns",
    autoResize: false, // it would draw all rows anew when the table comes into view, and so take the focus away
    placeholder: "No document matches.",
    rowFormatter: (row) => made.add(row),
  });
  return new Promise((resolve) => table.on("tableBuilt", () => {
    nameRows(holder);
    resolve([table, made]);
  }));
}

// A grid may contain rows and their groups only; Tabulator's scrolled element, which takes the focus, is neither
function nameRows(holder) {
  const scrolled = holder.querySelector(".tabulator-tableholder");
  scrolled.setAttribute("role", "rowgroup");
  scrolled.setAttribute("aria-label", "Rows; arrow keys move, Enter opens");
  scrolled.querySelector(".tabulator-table").setAttribute("role", "none");
  holder.removeAttribute("aria-owns");
}

// One row's link is in the order of the Tab key; the arrow keys move to others
class RowFocus {
  constructor(holder) {
    this.holder = holder;
    this.order = null;
    this.row = -1;
    this.table = null;
    holder.addEventListener("keydown", (event) => this.pressed(event));
  }

  follow(table) {
    this.table = table;
    this.order = null;
    for (const name of ["dataFiltered", "dataSorted"]) table.on(name, () => (this.order = null));
  }

  // Row numbers in the order of the table
  rows() {
    this.order ??= this.table.getData("active").map((data) => data.row);
    return this.order;
  }

  neighbour(row, step) {
    const place = this.rows().indexOf(row);
    return place < 0 ? undefined : this.rows()[place + step];
  }

  pressed(event) {
    if (!event.target.closest(".tabulator-tableholder")) return;
    const page = Math.floor(this.holder.clientHeight / ROW_HEIGHT) - 2;
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !this.rows().length) return;
    event.preventDefault();
    const next = this.rows().indexOf(this.row) + steps[event.key];
    this.moveTo(this.rows()[Math.min(Math.max(next, 0), this.rows().length - 1)]);
  }

  link(row) {
    const found = row < 0 ? false : this.table.getRow(row);
    return found ? found.getCell("document").getElement().querySelector("a") : null;
  }

  // The table keeps the focus while rows far away are scrolled to, since the focused one may be removed
  async moveTo(row) {
    this.mark(row);
    if (!this.inView(row)) {
      this.holder.querySelector(".tabulator-tableholder").focus({ preventScroll: true });
      if (!this.rows().includes(row)) return;
      await this.table.scrollToRow(row, "center", true);
      await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    }
    if (this.row !== row) return;
    this.mark(row);
    this.link(row)?.focus({ preventScroll: true });
  }

  inView(row) {
    const link = this.link(row);
    if (!link?.isConnected) return false;
    const [own, all] = [link, this.holder.querySelector(".tabulator-tableholder")].map((one) => one.getBoundingClientRect());
    return own.top >= all.top && own.bottom <= all.bottom;
  }

  mark(row) {
    this.link(this.row)?.setAttribute("tabindex", "-1");
    this.row = row;
    this.link(row)?.setAttribute("tabindex", "0");
  }
}
