// A part that is wider than its place scrolls; then, and only then, the keyboard must reach it.

export function scrolls(label: string): (node: HTMLElement) => () => void {
  return (node) => {
    const look = () => {
      if (node.scrollWidth > node.clientWidth) {
        node.tabIndex = 0;
        node.setAttribute("role", "group");
        node.setAttribute("aria-label", label);
      } else {
        for (const name of ["tabindex", "role", "aria-label"]) node.removeAttribute(name);
      }
    };
    const watcher = new ResizeObserver(look);
    watcher.observe(node);
    for (const child of node.children) watcher.observe(child);
    return () => watcher.disconnect();
  };
}
