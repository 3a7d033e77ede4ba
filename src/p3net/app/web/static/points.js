// Points of one image: a list in typed arrays, its changes with undo, and the merge of two tabs.
// A point is its coordinates, in pixels of the upright image, to a hundredth.

export const rounded = (value) => Math.round(value * 100) / 100;

export class PointList {
  constructor(list = []) {
    this.assign(list);
  }

  assign(list) {
    this.length = list.length;
    this.x = new Float64Array(Math.max(64, 2 * list.length));
    this.y = new Float64Array(this.x.length);
    list.forEach(([x, y], i) => {
      this.x[i] = x;
      this.y[i] = y;
    });
  }

  add(x, y) {
    if (this.length === this.x.length) {
      for (const axis of ["x", "y"]) {
        const larger = new Float64Array(2 * this.length);
        larger.set(this[axis]);
        this[axis] = larger;
      }
    }
    this.x[this.length] = x;
    this.y[this.length++] = y;
  }

  removeAt(index) {
    this.x.copyWithin(index, index + 1, this.length);
    this.y.copyWithin(index, index + 1, this.length--);
  }

  at(index) {
    return [this.x[index], this.y[index]];
  }

  indexOf(x, y) {
    for (let i = this.length - 1; i >= 0; i--) if (this.x[i] === x && this.y[i] === y) return i;
    return -1;
  }

  // A plain loop: 5,000 points take a few microseconds, which no index would make felt.
  nearest(x, y, radius) {
    let best = -1;
    let closest = radius * radius;
    for (let i = 0; i < this.length; i++) {
      const dx = this.x[i] - x;
      const dy = this.y[i] - y;
      const distance = dx * dx + dy * dy;
      if (distance <= closest) {
        closest = distance;
        best = i;
      }
    }
    return best;
  }

  inBox(left, top, right, bottom) {
    const found = [];
    for (let i = 0; i < this.length; i++) {
      if (this.x[i] >= left && this.x[i] <= right && this.y[i] >= top && this.y[i] <= bottom) found.push(this.at(i));
    }
    return found;
  }

  toList() {
    return Array.from({ length: this.length }, (_, i) => this.at(i));
  }
}

const key = ([x, y]) => `${x} ${y}`;

function tally(list) {
  const counts = new Map();
  for (const point of list ?? []) counts.set(key(point), (counts.get(key(point)) ?? 0) + 1);
  return counts;
}

// What two people made of one beginning. Of each place: a change by one of them holds; where both
// added or both removed, it was the same deed; null (unmarked) remains where nobody marks.
export function merge(base, mine, theirs) {
  const [before, here, there] = [base, mine, theirs].map(tally);
  const wanted = new Map();
  for (const place of new Set([...before.keys(), ...here.keys(), ...there.keys()])) {
    const b = before.get(place) ?? 0;
    const m = here.get(place) ?? 0;
    const t = there.get(place) ?? 0;
    let number = m + t - b;
    if (m > b && t > b) number = Math.max(m, t);
    if (m < b && t < b) number = Math.min(m, t);
    wanted.set(place, Math.max(0, number));
  }
  const result = [];
  for (const point of [...(theirs ?? []), ...(mine ?? [])]) {
    const left = wanted.get(key(point));
    if (left > 0) {
      result.push(point);
      wanted.set(key(point), left - 1);
    }
  }
  if (result.length) return result;
  const unmarked = base === null ? mine === null && theirs === null : mine === null || theirs === null;
  return unmarked ? null : [];
}

// A change {remove, add, before, after}: points, and whether the image counts as marked.
export class History {
  constructor() {
    this.done = [];
    this.undone = [];
  }

  push(change) {
    this.done.push(change);
    this.undone = [];
  }

  undo() {
    const change = this.done.pop();
    if (!change) return null;
    this.undone.push(change);
    return { remove: change.add, add: change.remove, before: change.after, after: change.before };
  }

  redo() {
    const change = this.undone.pop();
    if (change) this.done.push(change);
    return change ?? null;
  }
}
