// What is written into the field hides the rows that do not have every word of it.
"use strict";
document.querySelectorAll("input[type=search]").forEach((field) => {
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const table = document.getElementById(field.dataset.table);
    for (const row of table.tBodies[0].rows) {
      const text = Array.from(row.cells, (cell) => cell.textContent.toLowerCase()).join(" ");
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
});
