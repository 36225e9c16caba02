// The explorer of documents: task, rule and filters → the table; an address or a row → the document below it.

const ALL_TASKS = "all";
const BROWSERS = "Chrome and Edge from version 80, Firefox from 113 and Safari from 16.4";

class Explorer {
  constructor(root, index) {
    this.index = index;
    this.opened = new Map();
    this.filters = emptyFilters();
    this.rule = "";
    this.shown = null;
    this.table = null;
    this.controls = new Controls(this);
    this.holder = element("div", { id: "documents-table", "aria-label": "Documents" });
    this.panel = element("article", { id: "document", hidden: true, "aria-labelledby": "document-title" });
    this.focus = new RowFocus(this.holder);
    root.append(this.controls.element, this.holder, this.panel);
    document.addEventListener("keydown", (event) => this.pressed(event));
    window.addEventListener("hashchange", () => this.followAddress());
    window.addEventListener("resize", () => this.table?.redraw());
  }

  // Tasks are selected one after the other, so that a slow one does not replace a later one
  selectTask(number) {
    const show = () => this.showTask(number).catch((error) => this.controls.failed(error));
    this.selecting = (this.selecting ?? Promise.resolve()).then(show);
    return this.selecting;
  }

  async showTask(number) {
    const { tasks } = this.index;
    const entries = number === ALL_TASKS ? tasks : [tasks[number]];
    const opened = [];
    for (const entry of entries) {
      this.controls.progress(`Opening ${entry.label} (${opened.length + 1} of ${entries.length})`);
      opened.push(await this.open(entry));
    }
    this.number = number;
    this.filters = emptyFilters();
    this.rows = new Rows(opened);
    if (!this.controls.offers(this.rows, this.rule)) this.rule = "";
    this.controls.show(number, this.rows, this.rule);
    this.rows.useRule(this.index, this.rule);
    await this.buildTable();
  }

  async open(entry) {
    if (!this.opened.has(entry)) this.opened.set(entry, new Task(entry, await openBlock(entry.block)));
    return this.opened.get(entry);
  }

  async buildTable() {
    this.table?.destroy();
    [this.table, this.made] = await buildTable(this.holder, this.rows, this.index.runs);
    this.table.on("rowClick", (event, row) => this.goTo(row.getData().row));
    this.focus.follow(this.table);
    this.controls.count(this.rows.count, this.rows);
  }

  selectRule(rule) {
    this.rule = rule;
    this.rows.useRule(this.index, rule);
    this.filter();
    if (this.table.getSorters().length) this.table.setSort(this.table.getSorters().map(({ field, dir }) => ({ column: field, dir })));
    for (const row of [...this.made]) row.reformat();
  }

  filter() {
    const shown = shownRows(this.rows, this.filters);
    this.table.setFilter((data) => shown[data.row] === 1);
    this.controls.count(shown.reduce((sum, one) => sum + one, 0), this.rows);
    this.updateSteps();
  }

  goTo(row) {
    const address = this.rows.task(row).address(this.rows.place(row));
    if (location.hash === address) this.showDocument(row);
    else location.hash = address;
  }

  // An address is #task/id, or #task/subtask/id; others are places of the page
  async followAddress() {
    const parts = addressParts(location.hash);
    if (!parts) return;
    const [task, subtask, id] = parts;
    const number = this.index.tasks.findIndex((entry) => entry.task === task);
    if (number < 0) return this.notFound(`This page has no task "${task}".`);
    await this.selecting;
    if (!this.rows?.tasks.some((opened) => opened.entry === this.index.tasks[number])) await this.selectTask(number);
    const row = this.rows?.row(this.index.tasks[number], subtask, id) ?? -1;
    if (row < 0) return this.notFound(`This page has no document ${id} of "${subtask}".`);
    this.showDocument(row);
  }

  notFound(sentence) {
    this.shown = null;
    this.focus.mark(-1);
    const title = element("h3", { id: "document-title", tabindex: "-1" }, "Not found");
    this.panel.replaceChildren(title, element("p", { class: "problem" }, sentence));
    this.panel.hidden = false;
    announce(sentence);
    this.panel.scrollIntoView({ block: "start" });
  }

  showDocument(row) {
    this.shown = row;
    const [task, place] = [this.rows.task(row), this.rows.place(row)];
    const title = element("h3", { id: "document-title", tabindex: "-1" }, documentTitle(task, place));
    this.steps = [
      button("← Previous", () => this.step(-1), { "data-step": "-1" }),
      button("Next →", () => this.step(1), { "data-step": "1" }),
    ];
    const link = button("Copy link", () => announceCopy(location.href, "link"));
    const back = button("Back to the table (Esc)", () => this.closeDocument());
    const unofficial = task.entry.official === false;
    this.panel.replaceChildren(
      element("header", {}, title, element("p", { class: "buttons" }, ...this.steps, back, link)),
      ...(unofficial ? [element("p", { class: "problem" }, "Not the task's official documents.")] : []),
      ...documentSections(task, place, this.index.runs),
    );
    this.panel.hidden = false;
    this.focus.mark(row);
    this.updateSteps();
    title.focus({ preventScroll: true });
    this.panel.scrollIntoView({ block: "start" });
  }

  updateSteps() {
    if (this.shown === null) return;
    for (const one of this.steps) one.disabled = this.focus.neighbour(this.shown, Number(one.dataset.step)) === undefined;
  }

  step(by) {
    const row = this.focus.neighbour(this.shown, by);
    if (row !== undefined) this.goTo(row);
  }

  closeDocument() {
    const row = this.shown;
    this.shown = null;
    this.panel.hidden = true;
    history.replaceState(null, "", "#chapter-documents");
    this.holder.scrollIntoView({ block: "nearest" });
    return this.focus.moveTo(row);
  }

  pressed(event) {
    if (event.key === "Escape" && this.shown !== null && !event.target.closest("input, select")) this.closeDocument();
  }
}

function addressParts(hash) {
  const parts = hash.slice(1).split("/");
  if (parts.length < 2 || parts.length > 3) return null;
  try {
    const [task, ...rest] = parts.map(decodeURIComponent);
    return rest.length === 1 ? [task, task, rest[0]] : [task, ...rest];
  } catch {
    return null;
  }
}

// The first task is opened when the reader comes near
function startExplorer() {
  const root = document.getElementById("explorer");
  if (!root) return;
  if (typeof DecompressionStream === "undefined") {
    root.append(element("p", { class: "problem" }, `This browser cannot open the documents; ${BROWSERS} can.`));
    return;
  }
  const explorer = new Explorer(root, embedded("document-index"));
  if (!explorer.index.tasks.length) return;
  if (addressParts(location.hash)) explorer.followAddress();
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    if (!explorer.selecting) explorer.selectTask(0);
  }, { rootMargin: "400px" });
  observer.observe(root);
}
