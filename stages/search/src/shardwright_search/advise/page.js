"use strict";
const grid = JSON.parse(document.getElementById("grid").textContent);
const sliders = grid.labels.map((_, number) => document.getElementById(`slider-${number}`));

// Show the texts of the size that the sliders stand at.
function show() {
  sliders.forEach((slider, number) => {
    const words = grid.labels[number][slider.value];
    document.getElementById(`value-${number}`).textContent = words;
    slider.setAttribute("aria-valuetext", words);
  });
  const texts = grid.cells[sliders.map((slider) => slider.value).join(",")];
  grid.parts.forEach((part, number) => {
    document.getElementById(part).innerHTML = grid.texts[texts[number]];
  });
}

for (const slider of sliders) slider.addEventListener("input", show);
