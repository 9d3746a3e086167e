// What every part of the page shares: where we are, the words, the answers.

import type { Answer, Arguments, Catalogue, Control, Json, Lesson, Lessons } from "./contract";
import * as hash from "./hash";
import * as server from "./server";
import { fill } from "./template";

const THEME = "scaledot-theme";
const LANGUAGE = "scaledot-lang";
const PAUSE_MS = 120; // between two writes of the address

class App {
  route = $state.raw<hash.Route>(hash.parse(location.hash));
  lessons = $state.raw<Lessons | null>(null);
  words = $state.raw<Catalogue>({});
  answers = $state.raw<Record<string, Answer>>({});
  error = $state<string | null>(null);
  connected = $state(true);
  systemDark = $state(matchMedia("(prefers-color-scheme: dark)").matches);
  storedTheme = $state<string | null>(remembered(THEME));
  storedLanguage = $state<string | null>(remembered(LANGUAGE));
  // Derived: whoever reads them is not woken by every change of the address.
  lang = $derived((this.route.lang ?? this.storedLanguage ?? this.lessons?.lang) === "hi" ? "hi" : "en");
  theme = $derived(
    themed(this.route.theme) ?? themed(this.storedTheme) ?? (this.systemDark ? "dark" : "light"),
  );
  isCanned = server.canned !== null;
  line: server.Line;

  #loaded: Record<string, Catalogue> = {};
  #writing: ReturnType<typeof setTimeout> | undefined;
  #written = 0;
  #known = location.hash; // as last read or written

  constructor() {
    this.line = new server.Line(
      (answer) => {
        this.error = null;
        this.answers = { ...this.answers, [answer.lesson]: answer };
      },
      (error) => (this.error = error),
      (connected) => (this.connected = connected),
    );
    window.addEventListener("popstate", () => this.#moved());
    window.addEventListener("hashchange", () => this.#moved());
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => (this.systemDark = dark.matches));
  }

  async start(): Promise<void> {
    this.lessons = await server.lessons();
    await this.speak(this.lang);
  }

  lesson(name: string): Lesson | undefined {
    return this.lessons?.lessons.find((lesson) => lesson.name === name);
  }

  /** The words of a key, filled; a key that is missing shows itself. */
  say = (key: string, numbers: unknown = {}): string => fill(this.words[key] ?? key, numbers);

  has = (key: string): boolean => key in this.words;

  async speak(lang: string): Promise<void> {
    this.#loaded[lang] ??= await server.catalogue(lang);
    this.words = this.#loaded[lang];
    document.documentElement.lang = lang === "hi" ? "hi-Latn" : "en";
  }

  setLanguage(lang: string): void {
    remember(LANGUAGE, lang);
    this.storedLanguage = lang;
    this.#replace({ ...this.route, lang });
    void this.speak(lang);
  }

  setTheme(theme: "light" | "dark"): void {
    remember(THEME, theme);
    this.storedTheme = theme;
    this.#replace({ ...this.route, theme: this.route.theme ? theme : null });
  }

  /** Another panel: a new entry of the history. */
  open(lesson: string, given: Record<string, string> = {}): void {
    this.#flush();
    this.route = { ...this.route, lesson, given };
    history.pushState(null, "", hash.format(this.route));
    this.#known = location.hash;
    scrollTo({ top: 0 });
  }

  address(lesson: string, given: Record<string, string> = {}): string {
    return hash.format({ ...this.route, lesson, given });
  }

  /** A control was moved: the same entry of the history, written when the hand rests. */
  set(controls: Control[], values: Arguments, more: Record<string, Json> = {}): void {
    const kept = Object.fromEntries(
      Object.entries(this.route.given).filter(
        ([name]) => !controls.some((control) => control.name === name) && !(name in more),
      ),
    );
    for (const [name, value] of Object.entries(more)) {
      if (value !== null) kept[name] = hash.write(value);
    }
    this.#replace({ ...this.route, given: { ...kept, ...hash.changed(controls, values) } });
  }

  keep(name: string, value: string | null): void {
    this.set([], {}, { [name]: value });
  }

  #replace(route: hash.Route): void {
    this.route = route;
    clearTimeout(this.#writing);
    // At once, then with pauses: browsers refuse more than a few hundred writes in ten seconds.
    const pause = this.#written + PAUSE_MS - performance.now();
    if (pause <= 0) this.#flush();
    else this.#writing = setTimeout(() => this.#flush(), pause);
  }

  #flush(): void {
    clearTimeout(this.#writing);
    // Somebody has moved on, and we are about to be told: nothing of ours belongs there.
    if (location.hash !== this.#known) return;
    this.#written = performance.now();
    const wanted = hash.format(this.route);
    if (location.hash !== wanted) history.replaceState(null, "", wanted);
    this.#known = location.hash;
  }

  #moved(): void {
    clearTimeout(this.#writing);
    this.#known = location.hash;
    this.route = hash.parse(location.hash);
    void this.speak(this.lang);
  }
}

function themed(wanted: string | null): "light" | "dark" | null {
  return wanted === "light" || wanted === "dark" ? wanted : null;
}

function remembered(name: string): string | null {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // a file opened from disk may have no storage
  }
}

function remember(name: string, value: string): void {
  try {
    localStorage.setItem(name, value);
  } catch {
    // the address still says it
  }
}

export const app = new App();
