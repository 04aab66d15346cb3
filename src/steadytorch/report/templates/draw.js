"use strict";
// A picture that cannot be drawn leaves the others, and the tables, as they are.
for (const place of document.querySelectorAll(".chart")) {
  try {
    const figure = JSON.parse(place.nextElementSibling.textContent);
    Plotly.newPlot(place, figure.data, figure.layout, {
      responsive: true,
      // Dragging zooms and a double click resets; the bar hides data, and has a way to a cloud.
      displayModeBar: false,
    });
  } catch (error) {
    place.textContent = "This picture cannot be drawn: " + error.message;
  }
}
