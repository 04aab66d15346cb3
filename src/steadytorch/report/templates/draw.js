"use strict";
// A picture that cannot be drawn leaves the others, and the tables, as they are.
const drawn = [];
for (const place of document.querySelectorAll(".chart")) {
  try {
    const figure = JSON.parse(place.nextElementSibling.textContent);
    Plotly.newPlot(place, figure.data, figure.layout, {
      responsive: true,
      // Dragging zooms and a double click resets; the bar hides data, and has a way to a cloud.
      displayModeBar: false,
    });
    drawn.push(place);
  } catch (error) {
    place.textContent = "This picture cannot be drawn: " + error.message;
  }
}
// A sheet of paper is narrower than most windows, and no picture is drawn anew for it by itself.
addEventListener("beforeprint", () => {
  for (const place of drawn) Plotly.relayout(place, { width: 640 });
});
addEventListener("afterprint", () => {
  for (const place of drawn) Plotly.relayout(place, { width: null, autosize: true });
});
