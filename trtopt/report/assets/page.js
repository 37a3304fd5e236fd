// A click on a heading sorts its table: numbers by their value, largest first, text by the alphabet. What is written
// into the field over a table hides the rows that do not have every word of it.
"use strict";
document.querySelectorAll("th button").forEach((button) => {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const body = heading.closest("table").tBodies[0];
    const column = heading.cellIndex;
    const isNumber = heading.classList.contains("number");
    const was = heading.getAttribute("aria-sort");
    const down = was === null ? isNumber : was === "ascending";
    heading.parentNode.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = isNumber ? (a, b) => Number(key(a)) - Number(key(b)) : (a, b) => key(a).localeCompare(key(b));
    const rows = Array.from(body.rows).sort((a, b) => (down ? order(b, a) : order(a, b)));
    body.append(...rows);
  });
});
document.querySelectorAll("input[data-table]").forEach((field) => {
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const table = document.getElementById(field.dataset.table);
    for (const row of table.tBodies[0].rows) {
      const text = Array.from(row.cells, (cell) => cell.textContent.toLowerCase()).join(" ");
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
});
