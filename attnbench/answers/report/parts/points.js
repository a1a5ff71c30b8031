// Places for points and their names, so that they cover each other little.

// Points of a band that has no scale: as many lanes as leave room for the names, up to a limit.
function lanes(points, most) {
  const last = [];
  for (const point of [...points].sort((a, b) => a.x - b.x)) {
    const free = last.findIndex((end) => end + 6 < point.x - point.radius);
    point.lane = free >= 0 ? free : last.length < most ? last.length : last.indexOf(Math.min(...last));
    last[point.lane] = point.x + point.radius + 4 + widthOf(point.name, 11.5);
  }
  return Math.max(1, last.length);
}

const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;

// Which names have room, and where: the first free place around each circle, the most telling points first.
function namePlaces(points, frame, taken) {
  const circles = points.map(({ x, y, radius }) => around(x, y, radius * 0.8));
  const places = new Map();
  const order = [...points].sort((a, b) => Number(b.front) - Number(a.front) || b.radius - a.radius);
  for (const point of order) {
    const wide = widthOf(point.name, 11.5) + 2;
    const own = points.indexOf(point);
    const { x, y, radius } = point;
    const near = radius + 4;
    const slant = radius * 0.72 + 3;
    const tries = [
      [x + near, y + 4, "start"], [x - near, y + 4, "end"], [x, y - near - 1, "middle"], [x, y + near + 9, "middle"],
      [x + slant, y - slant, "start"], [x + slant, y + slant + 7, "start"],
      [x - slant, y - slant, "end"], [x - slant, y + slant + 7, "end"],
    ];
    const free = (box, others) =>
      box.left >= frame.left && box.right <= frame.right && box.top >= frame.top && box.bottom <= frame.bottom &&
      others.every((one) => apart(one, box)) && circles.every((one, k) => k === own || apart(one, box));
    const boxes = tries.map(([at, base, anchor]) => {
      const left = anchor === "start" ? at : anchor === "end" ? at - wide : at - wide / 2;
      return { left, right: left + wide, top: base - 10, bottom: base + 3, place: { x: at, y: base, "text-anchor": anchor } };
    });
    // Rather on the point's own cross than nowhere.
    const box = boxes.find((one) => free(one, taken)) || boxes.find((one) => free(one, taken.filter(({ own: of }) => of !== point)));
    if (box) {
      taken.push(box);
      places.set(point, box.place);
    }
  }
  return places;
}

const around = (x, y, half) => ({ left: x - half, right: x + half, top: y - half, bottom: y + half });

// One stop for the tab key; arrows go from point to point.
function roving(elements) {
  elements.forEach((element, place) => element.setAttribute("tabindex", place ? "-1" : "0"));
  const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
  elements.forEach((element, place) => {
    element.addEventListener("focus", () => {
      for (const other of elements) other.setAttribute("tabindex", other === element ? "0" : "-1");
    });
    element.addEventListener("keydown", (event) => {
      let next = null;
      if (event.key in step) next = elements[(place + step[event.key] + elements.length) % elements.length];
      if (event.key === "Home") next = elements[0];
      if (event.key === "End") next = elements[elements.length - 1];
      if (next) {
        event.preventDefault();
        next.focus({ preventScroll: true });
      }
    });
  });
}
