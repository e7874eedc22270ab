"use strict";
// A click on a column's name sorts by it, largest first for numbers; a second click turns that round.
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const words = new Intl.Collator(undefined, { numeric: true });
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const number = head.classList.contains("number");
    const first = number ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === first ? (number ? "ascending" : "descending") : first;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const compare = (a, b) => {
      const x = a.cells[column], y = b.cells[column];
      if (!number) return sign * words.compare(x.textContent, y.textContent);
      const u = parseFloat(x.dataset.v), v = parseFloat(y.dataset.v);
      if (isNaN(u) || isNaN(v)) return isNaN(u) - isNaN(v);
      return sign * (u - v);
    };
    body.append(...[...body.rows].sort(compare));
  }));
}
for (const field of document.querySelectorAll(".search input")) {
  const rows = [...field.closest(".table").querySelector("tbody").rows];
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    field.nextElementSibling.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  });
}
for (const figure of document.querySelectorAll("figure:has(> .legend)")) {
  const named = [...figure.querySelectorAll("[data-series]")];
  for (const item of figure.querySelectorAll(".legend [data-series]")) {
    const point = (on) => {
      figure.classList.toggle("pointing", on);
      for (const other of named) other.classList.toggle("pointed", on && other.dataset.series === item.dataset.series);
    };
    item.addEventListener("pointerenter", () => point(true));
    item.addEventListener("pointerleave", () => point(false));
  }
}
