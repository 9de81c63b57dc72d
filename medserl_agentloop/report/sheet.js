"use strict";
const COLUMNS = ["error", "matters", "visible", "remarks"];
const form = document.querySelector("form");
let unsaved = false;

form.addEventListener("input", () => { unsaved = true; });
addEventListener("beforeunload", event => { if (unsaved) event.preventDefault(); });
form.addEventListener("submit", event => {
  event.preventDefault();
  const rows = [["item", ...COLUMNS]];
  let open = 0;
  for (const item of form.querySelectorAll("fieldset")) {
    const answer = name => item.querySelector(`[data-column=${name}]:checked, textarea[data-column=${name}]`)?.value ?? "";
    open += answer("error") === "";
    rows.push([item.dataset.item, ...COLUMNS.map(answer)]);
  }
  const text = rows.map(row => row.map(cell => `"${cell.replaceAll('"', '""')}"`).join(",")).join("\n") + "\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type: "text/csv"}));
  link.download = "answers.csv";
  link.click();
  unsaved = false;
  form.querySelector("output").textContent = `Saved as answers.csv; ${open} pairs have no answer to the first question.`;
});
