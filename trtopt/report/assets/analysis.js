// A click on a column's heading sorts its table: numbers by their value, largest first, text by the alphabet.
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
