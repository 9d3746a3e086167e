// What arrives in parts is shown in one piece, so that nothing jumps while it is being read; but
// nobody looks at an empty page for long.

import { onDestroy } from "svelte";

const LONG_ENOUGH_MS = 800;

/** Of a component, while it is made: `over` says to show what there is. */
export class Patience {
  over = $state(false);

  constructor() {
    const timer = setTimeout(() => (this.over = true), LONG_ENOUGH_MS);
    onDestroy(() => clearTimeout(timer));
  }
}
