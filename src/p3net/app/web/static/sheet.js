// The marks of one image: changed here, saved at once, merged with what others changed meanwhile.

import { Refused, get, send, wait } from "./api.js";
import { History, PointList, merge } from "./points.js";

export class Sheet {
  // `onChange` is called after every change of the points, `onState` with how saving stands.
  constructor(image, onChange, onState) {
    this.image = image;
    this.onChange = onChange;
    this.onState = onState;
    this.points = new PointList(image.points ?? []);
    this.marked = image.points !== null;
    this.base = image.points;
    this.version = image.version;
    this.history = new History();
    this.dirty = false;
    this.saving = null;
  }

  list() {
    return this.marked ? this.points.toList() : null;
  }

  change({ remove = [], add = [], marked = true }) {
    const gone = remove.filter(([x, y]) => this.points.indexOf(x, y) >= 0);
    const change = { remove: gone, add, before: this.marked, after: marked };
    this.history.push(change);
    this.apply(change);
  }

  undo() {
    const change = this.history.undo();
    if (change) this.apply(change);
  }

  redo() {
    const change = this.history.redo();
    if (change) this.apply(change);
  }

  apply({ remove, add, after }) {
    for (const [x, y] of remove) {
      const index = this.points.indexOf(x, y);
      if (index >= 0) this.points.removeAt(index);
    }
    for (const [x, y] of add) this.points.add(x, y);
    this.marked = after || this.points.length > 0;
    this.dirty = true;
    this.onChange();
    this.save();
  }

  // One request at a time; what changes meanwhile goes with the next.
  save() {
    this.saving ??= this.#save().finally(() => (this.saving = null));
    return this.saving;
  }

  async #save() {
    while (this.dirty) {
      this.onState("saving");
      this.dirty = false;
      const sent = this.list();
      try {
        const headers = { "If-Match": `"${this.version}"` };
        const answer = await send("PUT", `images/${this.image.id}/marks`, { points: sent }, headers);
        this.base = sent;
        this.version = answer.version;
      } catch (error) {
        this.dirty = true;
        if (error instanceof Refused && error.status === 409 && error.body.version) {
          this.#join(error.body);
        } else if (error instanceof Refused) {
          this.onState("refused", error.message);
          return;
        } else {
          this.onState("offline");
          await wait(1);
        }
      }
    }
    this.onState("saved");
  }

  // Take in what another tab or program has written since.
  #join({ points, version }) {
    const merged = merge(this.base, this.list(), points);
    this.base = points;
    this.version = version;
    this.points.assign(merged ?? []);
    this.marked = merged !== null;
    this.onChange();
  }

  async refresh() {
    if (this.dirty || this.saving) return;
    const image = await get(`images/${this.image.id}`);
    if (image.version !== this.version && !this.dirty && !this.saving) this.#join(image);
  }
}
